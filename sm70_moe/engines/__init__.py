"""Adapters to host engines. Nothing else in the package imports them; each imports its host when it is used."""
