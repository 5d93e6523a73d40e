"""The help of ``lockstep bench``, generated from the table: the flags that work, one topic, or everything."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator

from lockstep.cli.flags.flag import TITLES, Flag, FlagKind, Group, Status
from lockstep.cli.flags.table import TABLE
from lockstep.cli.flags.values import did_you_mean, nearest
from lockstep.errors import BadInput

_WIDTH = 80
_INDENT = " " * 29

_INTRODUCTION = """\
lockstep bench: train a model on synthetic data and print images/sec.

On this machine, one server and two workers:
  lockstep bench --ps=1 --workers=2 --model=resnet50 --batch_size=8
One task of a cluster, the same lists on every task:
  lockstep bench --job_name=worker --task_index=0 --ps_hosts=10.0.0.1:2222 \\
    --worker_hosts=10.0.0.2:2222,10.0.0.3:2222 --model=resnet50
A single process:
  lockstep bench --model=trivial

Write --flag=value or --flag value; switches as --flag, --noflag, --flag=True.
"""


def help_text(topic: str) -> str:
    """The short help for an empty topic, else the help on one topic or on all (``full``); BadInput if it is unknown."""
    if not topic:
        return _short()
    if topic == "full":
        return "\n".join([_INTRODUCTION, *(_topic(group) for group in Group)])
    if topic not in [group.value for group in Group]:
        known = [group.value for group in Group]
        alike = nearest(topic, known, count=1)
        question = f"{did_you_mean(alike)} Topics" if alike else "topics"
        raise BadInput(f"there is no help on {topic!r}; {question}: {', '.join(known)}, full.")
    return _topic(Group(topic))


def _short() -> str:
    working = [flag for flag in TABLE if flag.status is Status.WORKS and not flag.same_as]
    parts = [_INTRODUCTION]
    for group in Group:
        rows = list(flag_rows(flag for flag in working if flag.group is group))
        if rows:
            parts.append("\n".join([TITLES[group], *rows, ""]))
    topics = ", ".join(group.value for group in Group)
    parts.append(
        _wrapped(f"--help=TOPIC shows all flags on a topic, including those of tf_cnn_benchmarks: {topics}.")
        + "\n--helpfull shows everything.\n"
    )
    return "\n".join(parts)


def _topic(group: Group) -> str:
    """All flags of a group with their status; flags with the same status and reason share a line."""
    flags = [flag for flag in TABLE if flag.group is group]
    lines = [TITLES[group], *flag_rows(flag for flag in flags if flag.status is Status.WORKS)]
    headings = {Status.NOTICE: "Accepted, without effect here:", Status.REFUSED: "Refused:"}
    for status, heading in headings.items():
        others = [flag for flag in flags if flag.status is status]
        if others:
            lines += ["", f"  {heading}", *_reasons(others)]
    return "\n".join([*lines, ""])


def flag_rows(flags: Iterable[Flag]) -> Iterator[str]:
    """One row of help per flag."""
    for flag in flags:
        default = flag.default_text()
        shown = "" if flag.same_as or flag.kind is FlagKind.SECRET or not default else f" ({default})"
        usage = f"  {flag.usage()}"
        if len(usage) > _WIDTH:
            usage = f"  --{flag.name}={flag.kind.value}"
            shown += f": one of {', '.join(choice for choice in flag.choices if choice)}"
        body = _wrapped(flag.help + shown, _INDENT)
        yield usage + body[len(usage) :] if len(usage) < len(_INDENT) else f"{usage}\n{body}"


def _reasons(flags: Iterable[Flag]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for flag in flags:
        by_reason.setdefault(flag.reason, []).append(f"--{flag.name}")
    for reason, names in by_reason.items():
        yield _wrapped(", ".join(names), "  ")
        yield _wrapped(reason, "      ")


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
    )
