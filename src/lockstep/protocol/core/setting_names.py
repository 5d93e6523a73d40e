"""Names of settings that get special treatment when two tasks are compared; all others only have to be equal."""

from __future__ import annotations

LOCKSTEP_VERSION = "lockstep version"
TORCH_VERSION = "torch version"
SERVERS = "number of servers"
WORKERS = "number of workers"

VERSIONS = frozenset({LOCKSTEP_VERSION, TORCH_VERSION})
"""Settings that differ because different programs are installed."""
COUNTS = frozenset({SERVERS, WORKERS})
"""Settings that follow from the host lists, which are compared entry by entry."""
