"""The library against the same loop in one process."""
