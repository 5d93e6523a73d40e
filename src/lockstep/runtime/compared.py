"""What ``lockstep compare --program`` tells a program that it starts, and what the program leaves behind.

A comparison starts the same program several times, each time in another shape, and names the shape in one variable.
``lockstep.join`` reads it (``library/comparing.py``); the times of the steps come back as one JSON file per trainer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from lockstep.errors import BadInput
from lockstep.foreign import read_json
from lockstep.private_files import own_folder, write_whole
from lockstep.transports.control.ports import PortRange, PortsUsedUp, ReservedPort

COMPARE_VARIABLE: Final = "LOCKSTEP_COMPARE"


class Shape(StrEnum):
    """How a program is run, by the name that ``--only`` takes."""

    LIMIT = "limit"
    SINGLE = "single"
    DDP = "ddp"
    RANKS = "ranks"
    SERVERS = "servers"


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedRun:
    """One run: its shape, how many steps are made and timed, and the folder for the times."""

    shape: Shape
    servers: int
    warm_up: int
    steps: int
    folder: Path

    def variable(self) -> str:
        """The value of the variable."""
        return json.dumps({**asdict(self), "folder": str(self.folder)})

    def times_of(self, worker: int) -> Path:
        """Where a trainer leaves its times."""
        return self.folder / f"times-{worker}.json"


def compared_run(environ: Mapping[str, str]) -> ComparedRun | None:
    """The run that this process belongs to, if a comparison started it. BadInput if the variable makes no sense."""
    text = environ.get(COMPARE_VARIABLE)
    if text is None:
        return None
    try:
        told: dict[str, Any] = read_json(text)
        return ComparedRun(
            shape=Shape(told["shape"]),
            servers=int(told["servers"]),
            warm_up=int(told["warm_up"]),
            steps=int(told["steps"]),
            folder=Path(told["folder"]),
        )
    except (KeyError, TypeError, ValueError):
        raise BadInput(f"the variable {COMPARE_VARIABLE} is for 'lockstep compare --program' only; unset it.") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepParts:
    """A mean step of one trainer, in seconds. ``rest`` is what is in none of the others: data, schedulers, printing."""

    steps: int
    step: float
    forward: float
    backward: float
    """Until the last gradient is made."""
    averaging: float
    """From there until backward returns: the rest of an all-reduce. 0 where nothing is exchanged in backward."""
    optimizer: float
    """``optimizer.step()``; with servers this is where a worker waits for its new parameters."""

    @property
    def rest(self) -> float:
        return max(0.0, self.step - self.forward - self.backward - self.averaging - self.optimizer)


def write_parts(path: Path, parts: StepParts) -> None:
    """Into a folder that only this user can have made."""
    with own_folder(path.parent) as folder:
        write_whole(folder, path.name, json.dumps(asdict(parts)).encode())


def read_parts(path: Path) -> StepParts:
    """ValueError or OSError if there are none."""
    told = read_json(path.read_bytes())
    try:
        return StepParts(
            steps=int(told["steps"]),
            step=float(told["step"]),
            forward=float(told["forward"]),
            backward=float(told["backward"]),
            averaging=float(told["averaging"]),
            optimizer=float(told["optimizer"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path.name} lacks {error}") from None


@contextlib.contextmanager
def two_ports() -> Iterator[int]:
    """The first of two neighbours on this machine: torch's, and the one after it, where Lockstep's tasks meet.

    Both are held until the end of the block, so that no other program is given them meanwhile.
    """
    with contextlib.ExitStack() as held:
        while True:
            first = held.enter_context(ReservedPort())
            after = first.port + 1
            with contextlib.suppress(PortsUsedUp, OverflowError):
                held.enter_context(ReservedPort("127.0.0.1", PortRange(after, after)))
                break
        yield first.port
