"""The one place that holds the version; torch-free, so that the monitor can read it."""

__version__ = "0.1.0"
