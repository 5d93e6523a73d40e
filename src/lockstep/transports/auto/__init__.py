"""The transport ``auto``: each link takes the first path that works, over memory registered with all of them."""
