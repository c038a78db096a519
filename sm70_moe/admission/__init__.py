"""Weighing policy, settings, layer and machine: every check, all reasons, no effects."""
