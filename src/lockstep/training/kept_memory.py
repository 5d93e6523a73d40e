"""Memory that a training loop frees stays with its process, for the next step.

glibc hands every large block back to the kernel when it is freed, and gets it again, page by page and zeroed, when the
same tensor is made in the next step. For layers with many parameters that is as expensive as the arithmetic: gradients
of 150 MB are 37,000 page faults. Training makes the same tensors in every step, so what was freed fits again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_NEVER = -1
_LARGEST_KEPT = 1 << 30
_LARGEST_KEPT_BEFORE = 32 << 20
"""What a glibc accepts that does not accept the other one (before 2.35)."""

_CHOSEN_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")
_TUNABLES = "GLIBC_TUNABLES"
_TUNABLES_OF_MALLOC = "glibc.malloc."


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let this process keep what it frees, for good; whether it does. A user's own setting of malloc is left alone."""
    if any(name in environ for name in _CHOSEN_BY_USER) or _TUNABLES_OF_MALLOC in environ.get(_TUNABLES, ""):
        return False
    if not _has_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    kept = mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT) or mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BEFORE)
    return bool(kept and mallopt(_TRIM_THRESHOLD, _NEVER))


def _has_glibc() -> bool:
    try:
        return bool(os.confstr("CS_GNU_LIBC_VERSION"))
    except (OSError, ValueError):
        return False
