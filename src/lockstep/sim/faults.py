"""Faults as data: those of a real cluster (``protocol/core/faults.py``), and those of a simulated one.

The first begin at a *step*; the second at a virtual *time*, which can hit any moment of a step. Both have the same
printed form, one line of JSON, so that a plan can travel on a command line.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args, get_type_hints

from lockstep.foreign import read_json
from lockstep.protocol.core import faults as shared
from lockstep.protocol.core.faults import Fault


@dataclass(frozen=True, slots=True)
class Crash:
    """``task`` is killed at this time, and restarted after ``restart_after`` seconds; -1: never."""

    task: str
    at: float
    restart_after: float = -1.0


@dataclass(frozen=True, slots=True)
class Pause:
    """``task`` is stopped (SIGSTOP) at this time, and continues after ``seconds``."""

    task: str
    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Partition:
    """From this time on, nothing passes between ``task`` and ``peer``; ``one_way``: only what ``task`` sends is lost.

    ``seconds`` -1: for good. The connection stays open, as over TCP: what was sent meanwhile arrives afterwards.
    """

    task: str
    peer: str
    at: float
    seconds: float = -1.0
    one_way: bool = False


@dataclass(frozen=True, slots=True)
class LoseConnection:
    """The connection of ``task`` and ``peer`` breaks at this time, losing what is in flight; it is then reopened."""

    task: str
    peer: str
    at: float


@dataclass(frozen=True, slots=True)
class StartLate:
    """``task`` is started ``seconds`` late; -1: never."""

    task: str
    seconds: float = -1.0


SimFault = Crash | Pause | Partition | LoseConnection | StartLate
AnyFault = Fault | SimFault

_KINDS: Mapping[str, type[SimFault]] = MappingProxyType({kind.__name__: kind for kind in get_args(SimFault)})


def to_fields(fault: AnyFault) -> dict[str, object]:
    """A fault as plain values."""
    return {"fault": type(fault).__name__, **dataclasses.asdict(fault)}


def to_text(fault: AnyFault) -> str:
    """One line of JSON."""
    return json.dumps(to_fields(fault))


def parse_fault(text: str) -> AnyFault:
    """Read the printed form back; ValueError is one plain sentence."""
    try:
        fields = read_json(text)
    except ValueError as error:
        raise ValueError(f"a fault must be a JSON object: {error}") from error
    kind = _KINDS.get(str(fields.get("fault"))) if isinstance(fields, dict) else None
    if kind is None:
        try:
            return shared.parse_fault(text)
        except ValueError as error:
            raise ValueError(f"{error}; the simulator also has: {', '.join(_KINDS)}") from error
    del fields["fault"]
    return _build(kind, fields)


def _build(kind: type[SimFault], fields: dict[str, object]) -> SimFault:
    types = get_type_hints(kind)
    for name, value in fields.items():
        wanted = types.get(name)
        if wanted is None:
            raise ValueError(f"{kind.__name__} has no field {name!r}; it has: {', '.join(types)}")
        if wanted is float and isinstance(value, int) and not isinstance(value, bool):
            fields[name] = float(value)
        elif not isinstance(value, wanted):
            raise ValueError(f"{kind.__name__}.{name} must be of type {wanted.__name__}, not {value!r}")
    try:
        return kind(**fields)  # type: ignore[arg-type]  # each field was just compared with its type
    except TypeError as error:
        raise ValueError(f"{kind.__name__} is missing a field: {error}") from error


def end_of(fault: AnyFault) -> float:
    """When it is over for good, in virtual seconds; 0 if it has no fixed time."""
    match fault:
        case Pause(at=at, seconds=seconds) | Partition(at=at, seconds=seconds):
            return at + max(seconds, 0.0)
        case Crash(at=at) | LoseConnection(at=at):
            return at
        case StartLate(seconds=seconds):
            return max(seconds, 0.0)
        case _:
            return 0.0
