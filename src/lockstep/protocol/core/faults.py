"""Faults as data: what can be made to go wrong in one task, or on one link, at one step.

The same values are injected into a real cluster (``runtime/task/injection.py``) and into the simulator. Each is plain
data with a printed form (``to_text``, ``parse_fault``), so that it can travel on a command line.

A fault names the *step* at which it begins. Faults on messages count the messages that they match: ``times`` of them
are hit; 0 means all from then on.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import get_args, get_type_hints

from lockstep.foreign import read_json
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.core.messages import Applied, Commit, Message, Open, Pull, Rates, Seal


class FaultPlace(StrEnum):
    """Where a training thread can get stuck."""

    USER_CODE = "user code"
    INPUT = "input"
    CHECKPOINT = "checkpoint"
    DEVICE = "device call"
    NO_DEVICE = "a call named like a device call"
    """In a process that uses no device."""
    LOOP = "loop"
    COMPILER = "compiler"
    BUSY = "busy"
    """What the program has announced."""
    BEFORE_PRODUCING = "before producing"
    """It waits for the next parameters before it has made its own gradients: it waits for itself."""


class Callback(StrEnum):
    """Whose thread a blocking callback holds up."""

    MESSAGE = "message"
    TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class DropMessage:
    """Control messages of this kind from ``task`` to ``peer`` never leave."""

    task: str
    peer: str
    kind: str
    step: Step = 0
    times: int = 0

    def hits(self, peer: TaskId, message: Message) -> bool:
        """Whether the fault hits this message."""
        return str(peer) == self.peer and type(message).__name__ == self.kind and _step_of(message) >= self.step


@dataclass(frozen=True, slots=True)
class DropTensor:
    """``task`` sends a bucket to ``peer``, counts it as sent, and it never arrives. ``bucket`` -1: any."""

    task: str
    peer: str
    step: Step = 0
    bucket: int = -1
    times: int = 1

    def hits(self, peer: TaskId, number: int, bucket: int) -> bool:
        """Whether the fault hits the transfer of this step or version of this bucket."""
        return str(peer) == self.peer and number >= self.step and self.bucket in (-1, bucket)


@dataclass(frozen=True, slots=True)
class BlockCallback:
    """A callback of the link from ``task`` to ``peer`` does not return for ``seconds``."""

    task: str
    peer: str
    callback: str = Callback.TENSOR.value
    step: Step = 0
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Freeze:
    """``task`` is stopped (SIGSTOP) as it begins ``step``."""

    task: str
    step: Step = 0


@dataclass(frozen=True, slots=True)
class Die:
    """``task`` is killed by this signal as it begins ``step``; 0: it exits with ``exit_code``."""

    task: str
    step: Step = 0
    signum: int = 9
    exit_code: int = 1


@dataclass(frozen=True, slots=True)
class Raise:
    """The training code of ``task`` raises an error with this number (errno) and text as it begins ``step``."""

    task: str
    step: Step = 0
    errno: int = 0
    text: str = "planted by a drill"


@dataclass(frozen=True, slots=True)
class Stick:
    """The training thread of ``task`` is stuck at ``place`` for ``seconds``, in ``step``. ``detail``: a file."""

    task: str
    place: str = FaultPlace.USER_CODE.value
    step: Step = 0
    seconds: float = 60.0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SlowSteps:
    """From ``step`` on, each step of ``task`` computes this much longer (it uses the processor and does not sleep)."""

    task: str
    step: Step = 0
    seconds: float = 3.0


@dataclass(frozen=True, slots=True)
class SlowCheckpoint:
    """The training thread of ``task`` writes for ``seconds`` in ``step``, a few bytes at a time.

    ``folder``: on a disk; of files in memory, which /tmp often has, the kernel does not count what is written.
    """

    task: str
    step: Step = 0
    seconds: float = 60.0
    folder: str = "/var/tmp"


@dataclass(frozen=True, slots=True)
class SlowReads:
    """Of ``steps`` steps after ``step``, each record of ``task`` takes this long to read, in the input of a drill."""

    task: str
    step: Step = 0
    seconds: float = 1.0
    steps: int = 1


@dataclass(frozen=True, slots=True)
class HitReaders:
    """The child processes of ``task``, which read its data, get this signal in ``step``; after ``seconds``, SIGCONT."""

    task: str
    step: Step = 0
    signum: int = 9
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CallExit:
    """The training code of ``task`` calls ``sys.exit`` with this code as it begins ``step``."""

    task: str
    step: Step = 0
    code: int = 5


@dataclass(frozen=True, slots=True)
class CloseDescriptors:
    """The training code of ``task`` closes all descriptors of its process in ``step``, and waits for ``seconds``."""

    task: str
    step: Step = 0
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class SlowStore:
    """From ``step`` on, each update of server ``task`` takes this much longer; ``busy``: it uses the processor."""

    task: str
    step: Step = 0
    seconds: float = 5.0
    busy: bool = True


@dataclass(frozen=True, slots=True)
class BlockLoop:
    """The loop of ``task`` does not return from an event for ``seconds``, in ``step``."""

    task: str
    step: Step = 0
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class EndEarly:
    """Worker ``task`` does only this many steps."""

    task: str
    steps: int


@dataclass(frozen=True, slots=True)
class OddSetting:
    """``task`` was started with another value of a setting that all must share."""

    task: str
    name: str = "optimizer"
    value: str = "adam"


@dataclass(frozen=True, slots=True)
class OddModel:
    """``task`` builds a model in which one parameter has another size."""

    task: str


@dataclass(frozen=True, slots=True)
class OddVersion:
    """``task`` reports this version of the program."""

    task: str
    version: str = "0.0.0"


@dataclass(frozen=True, slots=True)
class FailAtStart:
    """``task`` fails with this text before it joins; ``refused``: its command line is refused, so it never starts."""

    task: str
    text: str = "planted by a drill"
    refused: bool = False


Fault = (
    DropMessage
    | DropTensor
    | BlockCallback
    | Freeze
    | Die
    | Raise
    | Stick
    | SlowSteps
    | SlowCheckpoint
    | SlowReads
    | HitReaders
    | CallExit
    | CloseDescriptors
    | SlowStore
    | BlockLoop
    | EndEarly
    | OddSetting
    | OddModel
    | OddVersion
    | FailAtStart
)

_KINDS: Mapping[str, type[Fault]] = MappingProxyType({kind.__name__: kind for kind in get_args(Fault)})
_MAX_TEXT = 4096


def _step_of(message: Message) -> Step:
    """The step that a message is about; a request for version *v* belongs to the step that makes it."""
    if isinstance(message, Pull):
        return message.version - 1
    if isinstance(message, Open | Rates | Seal | Applied | Commit):
        return message.step
    return 0


def to_text(fault: Fault) -> str:
    """One line of JSON."""
    return json.dumps({"fault": type(fault).__name__, **dataclasses.asdict(fault)})


def parse_fault(text: str) -> Fault:
    """Read the printed form back; ValueError is one plain sentence."""
    if len(text) > _MAX_TEXT:
        raise ValueError(f"a fault has at most {_MAX_TEXT} characters, this one has {len(text)}")
    try:
        fields = read_json(text, _MAX_TEXT)
    except ValueError as error:
        raise ValueError(f"a fault must be a JSON object: {error}") from error
    kind = _KINDS.get(str(fields.pop("fault", ""))) if isinstance(fields, dict) else None
    if kind is None:
        raise ValueError(f'a fault needs a field "fault" that is one of: {", ".join(_KINDS)}')
    types = get_type_hints(kind)
    for name, value in fields.items():
        wanted = types.get(name)
        if wanted is None:
            raise ValueError(f"{kind.__name__} has no field {name!r}; it has: {', '.join(types)}")
        if wanted is float and isinstance(value, int) and abs(value) < 1 << 63:
            fields[name] = float(value)
        elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ValueError(f"{kind.__name__}.{name} must be of type {wanted.__name__}, not {value!r}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} is missing a field: {error}") from error


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Several faults, one per line; empty lines are ignored."""
    return tuple(parse_fault(line) for line in text.splitlines() if line.strip())
