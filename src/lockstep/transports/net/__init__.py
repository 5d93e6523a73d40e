"""Measures the transports against the best that the machine and the libraries below them can do."""
