"""Which transports tests can use."""

from __future__ import annotations

from typing import Final

from lockstep.transports.registry import known_transports, runs_here

RUN_HERE: Final = tuple(filter(runs_here, known_transports()))
"""The transports for which this machine has all libraries and devices."""
