"""What uses torch to train: buckets, hooks, optimizers, GPU memory."""
