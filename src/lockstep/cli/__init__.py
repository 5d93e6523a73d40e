"""One file per command. The only layer that reads environment variables."""
