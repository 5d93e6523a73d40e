"""Drills about the training program itself: what it does for long, and when that ends the job.

Each fault has a twin that must not end the job. Times are scaled down: what takes 90 s with the default settings takes
ten here, with ``--stall_after`` and ``--user_code_timeout`` shortened as well.
"""

from __future__ import annotations

from dataclasses import replace

from lockstep.drill.model import GRADIENT, STEP, W1, Drill
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.protocol.core.faults import FaultPlace, Stick

_STALL, _USER_CODE, _TWIN = 3.0, 10.0, 8.0
"""Shortened ``--stall_after`` and ``--user_code_timeout``, and how long a twin takes: between the two."""

_HANGS = Drill(
    name="user-code-sleeps",
    group="stuck",
    story="the training program of a worker hangs: it has --user_code_timeout, and not only --stall_after",
    faults=(Stick(W1, FaultPlace.USER_CODE, STEP),),
    kind=ReportKind.NOTICE,
    cause=Cause.USER_CODE,
    pair=(W1,),
    key=GRADIENT,
    step=STEP,
    stall_after=_STALL,
    user_code_timeout=_USER_CODE,
    ends_after=_USER_CODE,
    fooled=True,
)
_RETURNS = replace(_HANGS, steps=60, ends_after=None, goes_on=True)
"""The twin: it takes longer than ``--stall_after``, and comes back."""
_NEVER_ENDED = replace(_RETURNS, user_code_timeout=4.0)
"""What nobody but the program can judge may take longer than either."""

USER_CODE_DRILLS: tuple[Drill, ...] = (
    _HANGS,
    replace(
        _RETURNS,
        name="user-code-waits-long",
        story="twin of user-code-sleeps: the program waits on a socket, for example, and goes on",
        faults=(Stick(W1, FaultPlace.USER_CODE, STEP, _TWIN),),
    ),
    replace(
        _HANGS,
        name="user-code-loops",
        story="an endless Python loop in the training program: two stacks name its lines",
        faults=(Stick(W1, FaultPlace.LOOP, STEP),),
        cause=Cause.LOOPING,
    ),
    replace(
        _RETURNS,
        name="user-code-computes-long",
        story="twin of user-code-loops: the program evaluates, unannounced, and goes on",
        faults=(Stick(W1, FaultPlace.LOOP, STEP, _TWIN),),
        cause=Cause.LOOPING,
    ),
    replace(
        _NEVER_ENDED,
        name="evaluation-announced",
        story="an evaluation in job.busy() takes longer than --stall_after and --user_code_timeout",
        faults=(Stick(W1, FaultPlace.BUSY, STEP, _TWIN, "evaluation"),),
        cause=Cause.BUSY,
    ),
    replace(
        _NEVER_ENDED,
        name="compiles-long",
        story="torch.compile takes longer than --stall_after and --user_code_timeout",
        faults=(Stick(W1, FaultPlace.COMPILER, STEP, _TWIN),),
        cause=Cause.COMPILING,
    ),
    Drill(
        name="device-call-hangs",
        group="stuck",
        story="a device call of a worker does not return",
        faults=(Stick(W1, FaultPlace.DEVICE, STEP),),
        cause=Cause.DEVICE_CALL,
        pair=(W1,),
        key=GRADIENT,
        step=STEP,
    ),
    replace(
        _RETURNS,
        name="no-device-call",
        story="twin of device-call-hangs: a function is named like a device call, but no device is used",
        faults=(Stick(W1, FaultPlace.NO_DEVICE, STEP, _TWIN),),
    ),
)
