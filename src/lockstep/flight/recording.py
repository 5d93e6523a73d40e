"""What one rank's flight recorder held: its last calls of torch.distributed, as values.

A dump does not name its rank, nor when it was taken; whoever has the dump adds both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod

GLOO = "gloo"
DEFAULT_DESCRIPTION = "default_pg"
"""How torch describes the group of all ranks."""


class CallState(StrEnum):
    """What the recorder itself knows of a call."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"


@dataclass(frozen=True, slots=True)
class StackLine:
    """One frame of the program at the moment of a call."""

    function: str
    file: str
    line: int

    @property
    def of_program(self) -> bool:
        """Not of torch, another library, or Python itself, as far as a path tells."""
        folders = self.file.split("/")
        in_a_library = {"torch", "site-packages", "dist-packages"} & {*folders}
        is_file = self.file[:1] not in ("", "<")
        return is_file and not in_a_library and not any(folder[:8] == "python3." for folder in folders)


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors that went into a call, or came out of it: their sizes and types."""

    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return sum(prod(size) for size in self.sizes)


NO_TENSORS = Tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCall:
    """One call of one rank. Calls of a group have the same ``number`` on every rank (``p2p``: they have not)."""

    record: int
    group: str
    description: str = ""
    backend: str = ""
    operation: str = ""
    number: int = 0
    p2p: bool = False
    p2p_number: int = 0
    source: int = -1
    """Of a send or receive: ranks within the group, from ``source`` to ``target``."""
    target: int = -1
    inputs: Tensors = NO_TENSORS
    outputs: Tensors = NO_TENSORS
    state: CallState = CallState.SCHEDULED
    retired: bool = False
    created: float = 0.0
    """Seconds since 1970, by the clock of its host; 0: not known."""
    timeout: float = 0.0
    stack: tuple[StackLine, ...] = ()
    """Innermost first."""

    @property
    def over(self) -> bool:
        """The rank has left it. With gloo this may well mean that it failed: gloo retires both, and says no more."""
        return self.state is CallState.COMPLETED or (self.retired and self.backend == GLOO)

    @property
    def timed_out(self) -> bool:
        """Everybody but gloo: no longer watched, and not completed."""
        return self.retired and not self.over


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One rank's dump. Calls are in the order in which they were made."""

    rank: int
    version: str = ""
    calls: tuple[RecordedCall, ...] = ()
    members: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks of each group, where the dump says so (gloo's does not)."""
    taken: float = 0.0
    """When, in seconds since 1970; 0: not known."""

    @property
    def lost(self) -> int:
        """How many earlier calls the ring has overwritten."""
        return self.calls[0].record if self.calls else 0

    @property
    def gaps(self) -> bool:
        """Calls between others are left out: the dump was asked for active ones only."""
        return bool(self.calls) and self.calls[-1].record - self.calls[0].record >= len(self.calls)
