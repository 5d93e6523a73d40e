"""Asks a live cluster, and lets the analysis answer: what ``why``, ``dashboard`` and ``top`` have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping

from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.collect import look_at
from lockstep.diagnose.evidence import Evidence, Seen, ended_by
from lockstep.diagnose.verdict import Diagnosis
from lockstep.errors import BadInput
from lockstep.protocol.core.timing import NOTICE_SECONDS, PATIENCE_SECONDS, WHY_ASK_SECONDS
from lockstep.version import __version__


def cluster_at(address: str) -> dict[str, str]:
    """Every task of the cluster to which the task at ``address`` belongs, with its address."""
    first = look_at("", address, WHY_ASK_SECONDS, together=True)
    if first.monitor is None:
        raise BadInput(
            f"no task answers at {address} ({first.monitor_silence.text}); give the address of another task of "
            "the cluster, or the folder of the run."
        )
    cluster = dict(first.monitor.cluster) or {first.monitor.task: address}
    # The cluster may use a different name for this host than the person who asks.
    cluster[first.monitor.task] = address
    return cluster


def analysed(found: Mapping[str, Seen], asker: str) -> Diagnosis:
    """What was found, judged with the patience of somebody who asks from outside."""
    usual = max((seen.view.usual for seen in found.values() if seen.view is not None), default=NOTICE_SECONDS)
    evidence = Evidence(
        tasks=found,
        asker=asker,
        version=__version__,
        floor=max(1.5, 0.75 * min(usual, 60.0)),
        patience=max(PATIENCE_SECONDS, min(usual, 60.0)),
        time=time.time(),
        end=ended_by(found),
    )
    return analyse(evidence)
