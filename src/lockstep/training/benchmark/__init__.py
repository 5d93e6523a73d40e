"""The benchmark: a synthetic job of one worker, its training loop, and who updates the parameters."""
