"""``lockstep.join`` in a program that ``lockstep compare --program`` started: the same program in another shape.

In Lockstep's own shapes this is ``join`` as always, with another number of servers. As one process and under DDP the
program gets a job of the same look that does without Lockstep (``library/stand_in.py``).
"""

from __future__ import annotations

import atexit
import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, cast

from lockstep.runtime.compared import ComparedRun, Shape

if TYPE_CHECKING:
    from lockstep.library.job import Job
    from lockstep.library.join import JoinArguments

JoinWith = Callable[["JoinArguments", Mapping[str, str]], "Job"]


def join_compared(run: ComparedRun, arguments: JoinArguments, join_with: JoinWith) -> Job:
    """The job of this process in this run, with a clock on its steps."""
    from lockstep.library.stand_in import StandInJob
    from lockstep.library.step_clock import StepClock

    if run.shape in (Shape.RANKS, Shape.SERVERS):
        job = join_with(compared_arguments(arguments, run.servers), os.environ)
    else:
        job = cast("Job", StandInJob(run.shape, os.environ))
    clock = StepClock(run, job.worker)
    atexit.register(clock.conclude)
    job.on_wrap = clock.attach
    return job


def compared_arguments(arguments: JoinArguments, servers: int) -> JoinArguments:
    """What the program asks for, in the shape of the run, without what only the other shape has; nothing is saved, and
    nothing saved is resumed."""
    return dataclasses.replace(
        arguments,
        servers=servers,
        device=arguments.device if servers else "cpu",
        backend=None if servers else arguments.backend,
        ps_hosts=(),
        worker_hosts=(),
        job_name="",
        task_index=0,
        address=None,
        train_dir=None,
        save_model_secs=0,
        save_model_steps=None,
        from_scratch=False,
        on_worker_loss=None,
    )
