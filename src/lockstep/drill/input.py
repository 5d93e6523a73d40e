"""Drills of a worker's data and of checkpoints that had fooled us, each with a twin that must not be reported."""

from __future__ import annotations

import signal
from dataclasses import replace

from lockstep.drill.model import GRADIENT, STEP, W0, W1, Drill
from lockstep.drill.reading import RECORDS
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.faults import HitReaders, SlowCheckpoint, SlowReads

_BRIEF = 1.0
"""Seconds: less than the shortest wait that is ever reported."""
_READ = 1.0
"""Seconds that a slow read takes."""

_STOPPED = Drill(
    name="decoder-stopped",
    group="data",
    story="the process that reads a worker's data is stopped: it is named, and not the disk",
    faults=(HitReaders(W1, STEP, signal.SIGSTOP),),
    cause=Cause.INPUT_STARVED,
    pair=(W1,),
    key=GRADIENT,
    readers=1,
    fooled=True,
)
_SLOW = replace(
    _STOPPED,
    name="input-slow",
    story="each read of a worker's data takes a second: file, rate and share of the step are named",
    faults=(SlowReads(W1, STEP, _READ),),
    kind=ReportKind.NOTICE,
    cause=Cause.STRAGGLER,
    goes_on=True,
    steps=60,
)

INPUT_DRILLS: tuple[Drill, ...] = (
    _SLOW,
    replace(
        _SLOW,
        name="input-slow-but-healthy",
        story="twin of input-slow: the reads take as long, but so many are under way that no step waits for them",
        faults=(SlowReads(W1, 0, _READ, steps=8),),
        kind=None,
        goes_on=False,
        fooled=False,
        readers=RECORDS,
        steps=8,
        step_seconds=1.2 * _READ,
    ),
    _STOPPED,
    replace(
        _STOPPED,
        name="decoder-stopped-briefly",
        story="the same for a second: nothing is reported",
        faults=(HitReaders(W1, STEP, signal.SIGSTOP, _BRIEF),),
        kind=None,
        fooled=False,
        steps=100,
    ),
    replace(
        _STOPPED,
        name="decoder-killed",
        story="the process that reads a worker's data is killed: by which signal, and whether memory ran out",
        faults=(HitReaders(W1, STEP, signal.SIGKILL),),
        cause=Cause.FAILED,
        key="",
    ),
    Drill(
        name="checkpoint-writes-slowly",
        group="disk",
        story="twin of checkpoint-stuck: it writes for longer than --stall_after, and is never ended",
        faults=(SlowCheckpoint(W0, STEP, 8.0),),
        kind=ReportKind.NOTICE,
        cause=Cause.STRAGGLER,
        pair=(W0,),
        key=GRADIENT,
        step=STEP,
        stall_after=3.0,
        goes_on=True,
        fooled=True,
        steps=60,
    ),
)
