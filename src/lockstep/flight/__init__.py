"""The flight recorder of torch.distributed: dumps of anybody's job, read without running code, and what they prove."""
