"""Where the time of a step goes."""

from __future__ import annotations

from enum import StrEnum


class Part(StrEnum):
    """A part of a step. A worker computes and waits; a server collects and updates."""

    COMPUTING = "computing"
    WAITING = "waiting"
    COLLECTING = "collecting gradients"
    UPDATING = "updating"
