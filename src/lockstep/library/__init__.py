"""The library: your own program as one worker of a cluster. ``job.py`` is the object that the program uses."""
