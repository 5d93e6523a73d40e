"""The flags for metrics: of ``bench``, of the library, and of ``lockstep run``."""

from __future__ import annotations

from typing import Final

from lockstep.cli.flags.flag import FlagKind, Group, Rows

_ROWS = Rows(Group.CLUSTER)

METRICS_ROWS: Final = (
    _ROWS.works(
        "metrics_port",
        FlagKind.TEXT,
        None,
        "PORT, or HOST:PORT, where each task's metrics are shown for Prometheus; several tasks on one host take the "
        "ports from there on",
        upstream=False,
    ),
    _ROWS.works(
        "metrics_file",
        FlagKind.TEXT,
        None,
        "a file for each task's metrics, written every 10 seconds; the name of the task is added to its own",
        upstream=False,
    ),
)
