"""Real images: where they are, in which order they are used, and how they are decoded alongside the training.

Everything here except ``feed.py`` works without torch: decoding processes do not import it.
"""
