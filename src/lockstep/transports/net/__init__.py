"""Measures the transports next to the best that the machine and the libraries below them can do."""
