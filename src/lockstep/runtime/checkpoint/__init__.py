"""Checkpoints on disk: writing, verifying, resuming."""
