"""A running job, or one that has ended, as a page and as a screen: ``lockstep dashboard`` and ``lockstep top``."""
