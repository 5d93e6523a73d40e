"""Moves bytes between registered regions of two tasks and tells both ends what became of them."""
