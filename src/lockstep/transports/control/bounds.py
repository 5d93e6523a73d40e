"""The range of every number that a peer may say, by the name of its field, and the texts that must stay as they are.

Nothing in a job reaches these limits. They keep what does from becoming a loop without end, an allocation without
measure, or a line of three hundred digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from lockstep.protocol.core.ids import INITIAL_STEP, NOTHING_TO_APPLY, TaskId
from lockstep.protocol.core.placement import NOBODY

MOST_BYTES: Final = 1 << 48
MOST_SECONDS: Final = 1e12

_STEP: Final = (INITIAL_STEP - 1, NOTHING_TO_APPLY)
_BYTES: Final = (0, MOST_BYTES)
_COUNT: Final = (0, 1 << 53)
_INDEX: Final = (0, (1 << 31) - 1)
_PID: Final = (-1, (1 << 31) - 1)
_SIGNAL: Final = (0, 255)

WHOLE: Final[Mapping[str, tuple[int, int]]] = MappingProxyType(
    {
        **dict.fromkeys(("step", "version", "start", "steps", "committed"), _STEP),
        **dict.fromkeys(("nbytes", "elements", "bucket_bytes", "offset", "total"), _BYTES),
        **dict.fromkeys(("number", "change", "attempts", "loop", "iteration", "view", "calls"), _COUNT),
        **dict.fromkeys(
            ("bucket", "edition", "group", "have", "absent", "without", "workers", "home", "shard"), _INDEX
        ),
        **dict.fromkeys(("pid", "monitor_pid"), _PID),
        **dict.fromkeys(("signal", "leaving", "departure"), _SIGNAL),
        "second": (NOBODY, (1 << 31) - 1),
        "exit_code": (-(1 << 31), (1 << 32) - 1),
    }
)
ANY_64_BITS: Final = frozenset(("job", "incarnation", "former", "region", "address"))
"""Random numbers and places in memory."""

MAY_BE_INFINITE: Final = frozenset(("limit", "norm", "norm_type", "scale"))
"""Gradients may be infinite, or not numbers at all, and so may their norm be."""

FRACTIONS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("seconds", "phase_seconds", "printed_seconds", "sent_at"), MOST_SECONDS),
        "values": math.inf,  # learning rates and the like: finite, and otherwise the optimizer's affair
    }
)

AS_THEY_ARE: Final = frozenset(
    (("Setting", "name"), ("Setting", "value"), ("ParameterEntry", "name"), ("OptimizerEntry", "options"))
)
"""Compared with this task's own, hashed, or read by a program; shown only by phrases that make them plain."""

_TASKS: Final = frozenset(
    (
        ("Member", "task"),
        ("StateBefore", "task"),
        ("KeptCall", "first"),
        ("Join", "task"),
        ("MissingTask", "task"),
        ("Lost", "task"),
        ("Left", "task"),
        ("Failed", "culprit"),
    )
)
"""Names of tasks that machines look up; an empty culprit is the sender."""


def in_bounds(name: str, kind: Any) -> Callable[[Any], bool] | None:
    """Whether a value is in the range of this field; None if its type has no other values."""
    if kind is float and name in MAY_BE_INFINITE:
        return None
    if kind is float:
        most = FRACTIONS[name]
        return lambda value: math.isfinite(value) and abs(value) <= most
    if kind is not int or name in ANY_64_BITS:
        return None
    low, high = WHOLE[name]
    return lambda value: low <= value <= high


def must_name_a_task(owner: str, name: str) -> bool:
    """Whether a text is of no use unless it names a task."""
    return (owner, name) in _TASKS


def names_a_task(name: str, text: str) -> bool:
    """Whether this text of such a field does."""
    try:
        TaskId.parse(text)
    except ValueError:
        return name == "culprit" and not text
    return True


def stays_as_it_is(owner: str, name: str) -> bool:
    """Whether a text must arrive character by character."""
    return (owner, name) in AS_THEY_ARE


is_step: Final = in_bounds("step", int) or bool
"""Whether a number can be a step or a version."""
