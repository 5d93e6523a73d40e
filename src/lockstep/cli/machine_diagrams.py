"""Writes ``docs/machines.md``: the states of the protocol's machines, drawn from their transition tables.

``python -m lockstep.cli.machine_diagrams > docs/machines.md``; a test checks the file against the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from lockstep.protocol import member
from lockstep.protocol.coordinator import coordinator_machine
from lockstep.protocol.server import ledger, step_norm
from lockstep.protocol.worker import caller_machine, collective_machine, holdings

_HEAD = """\
# The state machines of the protocol

Generated from the transition tables by `python -m lockstep.cli.machine_diagrams > docs/machines.md`; do not edit. A
pair of state and trigger without an arrow here is a defect, and raises an error that names it. The named file explains
the states above each table. `docs/recovery.md` describes how incarnations of tasks come and go around them.
"""

_DRAWN: tuple[tuple[str, str, Any], ...] = (
    ("The coordinator's phase", "protocol/coordinator/running_job.py", coordinator_machine.JOB_PHASE_TRANSITIONS),
    ("A task's membership", "protocol/member.py", member.MEMBER_PHASE_TRANSITIONS),
    ("A bucket on a server", "protocol/server/ledger.py", ledger.SERVED_BUCKET_TRANSITIONS),
    ("The norm of a step on a server", "protocol/server/step_norm.py", step_norm.STEP_NORM_TRANSITIONS),
    ("A bucket on a worker", "protocol/worker/holdings.py", holdings.HELD_BUCKET_TRANSITIONS),
    (
        "A bucket that torch.distributed sums",
        "protocol/worker/collective_machine.py",
        collective_machine.SUMMED_BUCKET_TRANSITIONS,
    ),
    ("A call that all workers make", "protocol/worker/caller_machine.py", caller_machine.CALL_PHASE_TRANSITIONS),
)


def document() -> str:
    """The whole page."""
    parts = [_HEAD]
    for title, file, table in _DRAWN:
        parts.append(f"## {title}\n\n`{file}`\n\n```mermaid\n{diagram(table)}\n```\n")
    return "\n".join(parts)


def diagram(table: Mapping[tuple[StrEnum, StrEnum], StrEnum]) -> str:
    """One table as a state diagram; triggers between the same two states share an arrow."""
    first = next(iter(table))[0]
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    states = dict.fromkeys([state for state, _ in table] + list(table.values()))
    lines += [f"    {state.name} : {state.value}" for state in states]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, trigger), target in table.items():
        arrows.setdefault((state.name, target.name), []).append(trigger.value)
    lines += [f"    {source} --> {target} : {' / '.join(triggers)}" for (source, target), triggers in arrows.items()]
    leaving = {state for state, _ in table}
    lines += [f"    {state.name} --> [*]" for state in states if state not in leaving]
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
