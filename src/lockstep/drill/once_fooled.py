"""Drills of faults that had fooled us, each with a twin that must not be reported."""

from __future__ import annotations

from lockstep.drill.model import PS0, STEP, W0, W1, Drill, Surroundings
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.faults import CallExit, CloseDescriptors, Die, FailAtStart

ONCE_FOOLED: tuple[Drill, ...] = (
    Drill(
        name="log-disk-full",
        group="disk",
        story="the disk under the chief's log is full: it can print nothing, and training goes on",
        around=Surroundings(full_log=(W0,)),
        fooled=True,
        kind=None,
        steps=60,
    ),
    Drill(
        name="log-disk-full-killed",
        group="disk",
        story="a worker is killed while nobody can print: the report is in the files of the run",
        faults=(Die(W1, STEP),),
        around=Surroundings(full_log=(PS0, W0, W1)),
        cause=Cause.DEAD,
        pair=(W1,),
        step=STEP,
    ),
    Drill(
        name="start-fails",
        group="start",
        story="a worker fails while it starts, because torch is broken or memory is limited",
        faults=(FailAtStart(W1, "ImportError: libtorch.so: cannot map segment"),),
        fooled=True,
        cause=Cause.DEAD,
        pair=(W1,),
    ),
    Drill(
        name="flag-refused",
        group="start",
        story="the command line of a worker is refused: a bad flag, or a missing folder",
        faults=(FailAtStart(W1, "--modle is not a flag; did you mean --model?", refused=True),),
        fooled=True,
        cause=Cause.DEAD,
        pair=(W1,),
    ),
    Drill(
        name="user-code-exits",
        group="lost task",
        story="the training program of a worker calls sys.exit(5): the code is named",
        faults=(CallExit(W1, STEP, 5),),
        fooled=True,
        cause=Cause.DEAD,
        pair=(W1,),
    ),
    Drill(
        name="descriptors-closed",
        group="lost task",
        story="the training program of a worker closes all descriptors, and lives on: it has no exit code",
        faults=(CloseDescriptors(W1, STEP),),
        fooled=True,
        cause=Cause.COMMUNICATION,
        pair=(W1,),
    ),
)
