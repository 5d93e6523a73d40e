"""From a list of addresses to a cluster: checks before the start, finding the others, showing progress."""
