"""The machines of a worker, with servers and without."""
