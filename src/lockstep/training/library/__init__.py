"""The library: a program of one's own as one worker of a cluster. ``job.py`` is what the program holds in its hand."""
