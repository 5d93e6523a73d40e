"""Makes ``docs/flags.md`` from the table: ``python -m lockstep.cli.flags.document > docs/flags.md``."""

from __future__ import annotations

import sys
from collections import Counter

from lockstep.cli.flags.flag import TITLES, Flag, Group, Kind, Status
from lockstep.cli.flags.table import EXCLUSIVE, TABLE

_INTRODUCTION = """\
# Flags of `lockstep bench`

This page is made from the table that the program itself reads, by `python -m lockstep.cli.flags.document`; a test holds
the two together. It accounts for every flag of tf_cnn_benchmarks. Each flag has one of three states:

- **works**: it does what it says.
- **accepted, does nothing**: the run starts, and a notice says why the flag has no effect here.
- **refused**: its effect is not there, so the run does not start (exit code 2), and a sentence says what to do instead.
  With its default value it asks for nothing and is accepted.

Write `--flag value` or `--flag=value`; switches as `--flag`, `--noflag`, `--flag=True`, `--flag=False`. A word after a
switch (`--flag False`) is refused, because it would be ignored. A flag may be repeated with the same value only.
A flag marked with * is not one of tf_cnn_benchmarks.
"""


def document() -> str:
    """The whole page."""
    counts = Counter(flag.status for flag in TABLE if flag.upstream)
    parts = [
        _INTRODUCTION,
        f"Of the {counts.total()} flags of tf_cnn_benchmarks, old and new, {counts[Status.WORKS]} work, "
        f"{counts[Status.NOTICE]} are accepted and do nothing, and {counts[Status.REFUSED]} are refused.\n",
    ]
    parts += [_section(group) for group in Group]
    parts.append("## Flags that exclude one another\n")
    parts += ["- " + ", ".join(f"`--{name}`" for name in names) for names in EXCLUSIVE]
    return "\n".join(parts) + "\n"


def _section(group: Group) -> str:
    rows = [_row(flag) for flag in TABLE if flag.group is group]
    heading = "| flag | default | meaning | state |\n|---|---|---|---|"
    return "\n".join([f"## {TITLES[group]}\n", heading, *rows, ""])


def _row(flag: Flag) -> str:
    star = "" if flag.upstream else " *"
    default = f"`{flag.default_text()}`" if flag.default_text() and flag.kind is not Kind.SECRET else ""
    cells = (f"`{flag.usage()}`{star}", default, flag.help, _state(flag))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _state(flag: Flag) -> str:
    parts = [flag.status.value if flag.status is Status.WORKS else f"**{flag.status.value}**: {flag.reason}"]
    if flag.needs:
        parts.append(f"needs `--{flag.needs}`")
    if flag.only_with is not None:
        parts.append(f"only with `--{flag.only_with[0]}={' or '.join(flag.only_with[1])}`")
    by_reason: dict[str, list[str]] = {}
    for choice, reason in flag.refused_choices:
        if choice not in flag.choices:
            by_reason.setdefault(reason, []).append(f"`{choice}`")
    parts += [f"{', '.join(choices)} **refused**: {reason}" for reason, choices in by_reason.items()]
    return "; ".join(part.removesuffix(".") for part in parts)


if __name__ == "__main__":
    sys.stdout.write(document())
