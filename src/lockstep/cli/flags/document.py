"""Makes ``docs/flags.md`` from the table: ``python -m lockstep.cli.flags.document > docs/flags.md``."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter

from lockstep.cli.flags.flag import TITLES, Flag, FlagKind, Group, Status
from lockstep.cli.flags.table import EXCLUSIVE, TABLE

_INTRODUCTION = """\
# Flags of `lockstep bench`

This page is generated from the table that the program itself reads, by `python -m lockstep.cli.flags.document`; a test
checks that it is up to date. It covers every flag of tf_cnn_benchmarks. Each flag has one of three states:

- It **works** as described. Flags without another mark work.
- **Accepted, does nothing**: the run starts, and a notice explains why the flag has no effect here.
- **Refused**: its effect is not available, so the run does not start (exit code 2), and a message explains what to do
  instead. With its default value the flag requests nothing and is accepted.

Write `--flag value` or `--flag=value`; switches as `--flag`, `--noflag`, `--flag=True`, `--flag=False`. A value after a
switch (`--flag False`) is refused, because it would be ignored. A flag may be repeated only with the same value.
A flag marked with \\* is not one of tf_cnn_benchmarks.
"""

_WIDTH = 120


def document() -> str:
    """The whole page."""
    counts = Counter(flag.status for flag in TABLE if flag.upstream)
    parts = [
        _INTRODUCTION,
        f"Of the {counts.total()} flags of tf_cnn_benchmarks, old and new, {counts[Status.WORKS]} work, "
        f"{counts[Status.NOTICE]} are accepted and do nothing, and {counts[Status.REFUSED]} are refused.\n",
    ]
    parts += [_section(group) for group in Group]
    parts.append("## Flags that exclude each other\n")
    parts += [_item(", ".join(f"`--{name}`" for name in names)) for names in EXCLUSIVE]
    return "\n".join(parts) + "\n"


def _section(group: Group) -> str:
    items = [_item(_description(flag)) for flag in TABLE if flag.group is group]
    return "\n".join([f"## {TITLES[group]}\n", *items, ""])


def _item(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def _description(flag: Flag) -> str:
    star = "" if flag.upstream else " \\*"
    default = f" (default `{flag.default_text()}`)" if flag.default_text() and flag.kind is not FlagKind.SECRET else ""
    usage, sentences = flag.usage(), [flag.help]
    if len(usage) > _WIDTH // 2:
        usage = f"--{flag.name}={flag.kind.value}"
        sentences.append(f"One of {', '.join(f'`{choice}`' for choice in flag.choices if choice)}")
    return f"`{usage}`{star}{default}: " + ". ".join(part.removesuffix(".") for part in sentences + _state(flag)) + "."


def _state(flag: Flag) -> list[str]:
    """What a user must know besides the flag's meaning, one sentence each."""
    parts = [] if flag.status is Status.WORKS else [f"**{flag.status.value.capitalize()}**: {flag.reason}"]
    if flag.needs:
        parts.append(f"Needs `--{flag.needs}`")
    if flag.only_with is not None:
        name, values = flag.only_with
        parts.append("Only with " + " or ".join(f"`--{name}={value}`" for value in values))
    by_reason: dict[str, list[str]] = {}
    for choice, reason in flag.refused_choices:
        if choice not in flag.choices:
            by_reason.setdefault(reason, []).append(f"`{choice}`")
    return parts + [f"**Refused**: {', '.join(choices)}: {reason}" for reason, choices in by_reason.items()]


if __name__ == "__main__":
    sys.stdout.write(document())
