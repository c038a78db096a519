"""Telling what was decided: as text, as records, as a checkpoint's description."""
