"""The transport ``auto``: each link takes the first path that works, over memory that all of them know."""
