"""``lockstep watch``: the diagnosis for any PyTorch job, from outside."""
