"""One file a command. The only layer that reads environment variables."""
