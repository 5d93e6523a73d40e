"""What a task tells its monitor for ``/metrics``: a few sums and states, as JSON, made only when asked for.

Much less than a snapshot, which reads the whole journal: a monitor asks every few seconds, for as long as a job runs.
Lists are bounded: however many tasks a cluster has, one of them names ``MOST_PEERS`` of its peers.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from typing import Any, Final, Protocol

from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.waits import Wait
from lockstep.runtime.task.connection import UP
from lockstep.runtime.trace.step_tally import BOUNDS, StepTally
from lockstep.runtime.trace.traffic import Traffic
from lockstep.runtime.watch.snapshot import Shown
from lockstep.security.refusals import REFUSALS

MOST_PEERS: Final = 16


class MeasuredNode(Shown, Protocol):
    """What the metrics of a node are read from."""

    traffic: Traffic
    start_step: int

    @property
    def checkpoint_written(self) -> float: ...

    @property
    def has_replica(self) -> bool | None: ...

    @property
    def rejoins(self) -> int: ...


def metrics_json(node: MeasuredNode) -> bytes:
    """The same as JSON."""
    return json.dumps(metrics_of(node)).encode()


def metrics_of(node: MeasuredNode) -> dict[str, Any]:
    """All of them. The first call starts the tally of steps."""
    now, sampler = time.monotonic(), node.sampler
    if sampler.tally is None:
        sampler.tally = StepTally(node.task.role)
    last = sampler.last_step_at()
    return {
        "job": hex64(node.job),
        "incarnation": hex64(node.incarnation),
        "run": node.publisher.run,
        "step": node.machine.role.step,
        "started_at": max(0, node.start_step),
        "last_step": time.time() - (now - last) if last else 0.0,
        "examples": node.main.examples,
        "rejoins": node.rejoins,
        "replica": node.has_replica,
        "checkpoint": node.checkpoint_written,
        "refused": (REFUSALS.summary() or {}).get("callers", 0),
        "verdict": node.publisher.last_verdict,
        "verdicts": dict(node.publisher.verdicts),
        **_tallied(sampler.tally),
        **_waits(node.loop.books.waits, now),
        **_links(node, now),
    }


def _tallied(tally: StepTally) -> dict[str, Any]:
    waited = {str(peer): seconds for peer, seconds in list(tally.waited.items())}
    return {
        "bounds": list(BOUNDS),
        "steps": tally.steps.fields(),
        "counted": tally.counted,
        "parts": {part.value: histogram.fields() for part, histogram in list(tally.parts.items())},
        "productive": tally.productive,
        "waited": _most(waited),
        "waited_in_all": sum(waited.values()),
    }


def _waits(waits: tuple[Wait, ...], now: float) -> dict[str, Any]:
    """The longest open wait for each peer."""
    longest: dict[str, float] = {}
    for wait in waits:
        on = str(wait.on)
        longest[on] = max(longest.get(on, 0.0), now - wait.since)
    return {"waits": _most(longest)}


def _links(node: MeasuredNode, now: float) -> dict[str, Any]:
    states: Counter[tuple[str, str]] = Counter()
    down: dict[str, float] = {}
    running = []
    for peer, keeper in list(node.peers.items()):
        use = keeper.use()
        states[use.path, use.state] += 1
        if use.state != UP:
            down[str(peer)] = keeper.seconds_unheard(now)
        if use.counters is not None:
            running.append((use.path, use.counters))
    return {
        "links": [[path, state, count] for (path, state), count in sorted(states.items())],
        "down": list(_most(down)),
        "bytes": [[path, sent, received] for path, (sent, received) in node.traffic.moved(running).items()],
    }


def _most(seconds: dict[str, float]) -> dict[str, float]:
    return dict(heapq.nlargest(MOST_PEERS, seconds.items(), key=lambda one: one[1]))
