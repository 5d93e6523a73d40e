"""Real pictures: where they lie, in which order they are taken, and how they are decoded beside the training.

Everything here but ``feed.py`` works without torch: the processes that decode import none of it.
"""
