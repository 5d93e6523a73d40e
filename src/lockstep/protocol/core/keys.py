"""The tensor key: ``src;incarnation;dst;name;frame:iter``, and the step next to it.

It is printed in this form everywhere (logs, errors, reports), so that it can be grepped for on both sides. The
last part is always ``0:0`` here; it is kept because people's tools split a key into exactly five parts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.protocol.core.ids import Incarnation, Step, TaskId, hex64


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Which tensor travels from which task (and incarnation) to which task."""

    source: TaskId
    incarnation: Incarnation
    target: TaskId
    name: str

    def __str__(self) -> str:
        return f"{self.source};{hex64(self.incarnation)};{self.target};{self.name};0:0"

    def at_step(self, step: Step) -> str:
        """Key, then step, as in the logs of the original system."""
        return f"{self} step {step}"

    @classmethod
    def parse(cls, text: str) -> TensorKey:
        """Read the printed form back; ValueError names what is wrong with it."""
        parts = text.split(";")
        if len(parts) != 5:
            raise ValueError(f"a tensor key has five parts separated by ';', this one has {len(parts)}: {text!r}")
        source, incarnation, target, name, frame = parts
        if frame != "0:0":
            raise ValueError(f"a tensor key ends in 0:0, this one in {frame!r}")
        if re.fullmatch("[0-9a-f]{16}", incarnation) is None:
            raise ValueError(f"an incarnation has 16 hexadecimal digits, not {incarnation!r}")
        return cls(TaskId.parse(source), int(incarnation, 16), TaskId.parse(target), name)


def gradient_name(bucket: int) -> str:
    """Name part of the key of a gradient bucket."""
    return f"gradient/bucket_{bucket}"


def parameter_name(bucket: int) -> str:
    """Name part of the key of a parameter bucket."""
    return f"parameter/bucket_{bucket}"


def all_reduce_name(bucket: int) -> str:
    """Name part of the key of a bucket that workers sum among themselves."""
    return f"allreduce/bucket_{bucket}"
