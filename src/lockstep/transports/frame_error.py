"""The error that ends a link whose peer breaks its rules."""

from __future__ import annotations


class FrameError(Exception):
    """The peer broke the rules of the link, or sent bytes that are not a frame; the text says how."""
