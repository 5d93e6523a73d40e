"""Measures the transports, next to what the machine and the libraries below them can do at best."""
