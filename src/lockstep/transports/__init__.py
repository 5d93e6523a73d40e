"""Moves bytes between registered regions of two tasks and reports the outcome to both ends."""
