"""The benchmark: one worker's synthetic job, its training loop, and what updates the parameters."""
