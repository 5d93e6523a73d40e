"""Names used on command lines; imports nothing, so that every process can import it."""

from __future__ import annotations

IMAGENET, CIFAR10, PICTURES, DIGITS = "imagenet", "cifar10", "pictures", "digits"
NAMES = (IMAGENET, CIFAR10, PICTURES, DIGITS)

RESIZE_METHODS = ("bilinear", "nearest", "bicubic", "area")


def is_real(name: str, folder: str | None) -> bool:
    """Whether a run reads a data set; otherwise its images are synthetic."""
    return folder is not None or name == DIGITS
