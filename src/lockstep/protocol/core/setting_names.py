"""Names of settings that have a meaning of their own where two tasks are compared; all others only have to be equal."""

from __future__ import annotations

LOCKSTEP_VERSION = "lockstep version"
TORCH_VERSION = "torch version"
SERVERS = "number of servers"
WORKERS = "number of workers"

VERSIONS = frozenset({LOCKSTEP_VERSION, TORCH_VERSION})
"""What differs because other programs are installed."""
COUNTS = frozenset({SERVERS, WORKERS})
"""What follows from the host lists, which are compared entry by entry."""
