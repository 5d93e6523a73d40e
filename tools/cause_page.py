"""Makes ``docs/causes.md`` from the code's own tables: ``python -m tools.cause_page > docs/causes.md``."""

from __future__ import annotations

import sys
import textwrap

from lockstep.diagnose.phrases.remedies import REMEDIES
from lockstep.drill.catalogue import DRILLS
from lockstep.protocol.core.causes import LOSSES, Cause
from lockstep.protocol.core.endings import ENDS, Ends

_WIDTH = 120

_INTRODUCTION = """\
# Causes

Made from the tables that the program itself reads, by `python -m tools.cause_page`; a test checks that it is up to
date. A report names one of these after `verdict:`, `stall:` or `why:`; `events.jsonl` has it in the field `cause`.
[On call](on-call.md#from-cause-to-action) has what to type, [when a job
hangs](when-a-job-hangs.md#the-evidence-for-each-cause) what proves each.
"""

_WHEN = {
    Ends.AT_ONCE: "at once: waiting longer changes nothing",
    Ends.AFTER_STALL: "after `--stall_after` (60 s) without progress: it may heal",
    Ends.AFTER_USER_CODE: "after `--user_code_timeout` (600 s) without progress",
    Ends.NEVER: "never: the job goes on, only slower",
}


def page() -> str:
    """The whole page: one section per cause, in the order of the code."""
    return "\n".join([_INTRODUCTION, *(_section(cause) for cause in Cause)])


def _section(cause: Cause) -> str:
    drills = [drill.name for drill in DRILLS if drill.cause is cause and drill.kind is not None]
    lines = [f"**What to do**: {REMEDIES[cause]}", f"**The job ends** {_when(cause)}."]
    if drills:
        lines.append(f"**To see it**: `lockstep drill {drills[0]}`{_others(drills[1:])}")
    return "\n".join([f"## {cause.value}\n", *(_item(line) for line in lines), ""])


def _when(cause: Cause) -> str:
    if cause in LOSSES:
        return "at once, unless it waits for the lost task: [who comes back](recovery.md#who-comes-back)"
    return _WHEN[ENDS[cause]]


def _others(names: list[str]) -> str:
    return f"; also {', '.join(f'`{name}`' for name in names)}" if names else ""


def _item(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


if __name__ == "__main__":
    sys.stdout.write(page())
