"""A whole cluster on this machine from one command."""
