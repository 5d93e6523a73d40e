"""The object that a program uses: one worker of a job, with the wrapped model and optimizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar, Unpack, overload
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.data import IterableDataset

from lockstep.errors import EXIT_FAILED
from lockstep.library.atexit import ExitWitness, why_it_left
from lockstep.library.devices import own_device
from lockstep.library.errors import UsageError
from lockstep.library.loop_position import LoopTracker
from lockstep.library.own_group import OwnGroup
from lockstep.library.rank_training import RankTraining
from lockstep.library.served import ServedTraining
from lockstep.library.sharding import DataShard, IterableShard, MapShard, MapStyle, ShardOptions, make_shard
from lockstep.library.state_codec import Stateful
from lockstep.library.talking import Talk
from lockstep.library.training_way import JobOptions, JobParts, NormClip, Say, StepCounts, TrainingWay
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import Reason, own_error
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.protocol.core.leaving import Departure
from lockstep.runtime.garbage import spare_collector, use_collector
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.kept_memory import keep_freed_memory

Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])


class Job:
    """One worker of a running cluster. Create it with ``lockstep.join()``; close it, or use it in a ``with`` block."""

    def __init__(
        self,
        node: WorkerNode | CollectiveNode,
        options: JobOptions,
        say: Say,
        on_close: Callable[[], None],
        exits: ExitWitness | None = None,
    ) -> None:
        self._node = node
        self._on_close = on_close
        self._exits = exits or ExitWitness()
        self._shards: WeakSet[MapShard] = WeakSet()
        self._course = LoopTracker(node, say)
        self._counts = StepCounts()
        self._closed = False
        self._wrapped = False
        self._process = os.getpid()
        self.on_wrap: Callable[[Sequence[nn.Module], Sequence[torch.optim.Optimizer]], None] | None = None
        """Called with what ``wrap()`` was given, before anything else is done with it: for a comparison's clock."""
        self._talk = Talk(
            self.worker,
            self.workers,
            node.calls.call,
            self._course.place_of_calls,
            self._refuse_in_child,
            may_lag=node.config.aggregate is not None,
        )
        self._group = OwnGroup(node.cluster, self._talk, self._refuse_in_child)
        node.main.enter(Doing.STARTING)  # whose thread it is: what a program does before wrap() can be shown
        parts = JobParts(
            options,
            say,
            self._course,
            self._exits,
            self._shards,
            self._counts,
            self._refuse_in_child,
            self._talk.barrier,
        )
        self._training: TrainingWay = (
            ServedTraining(node, parts)
            if isinstance(node, WorkerNode) and node.means is None
            else RankTraining(node, parts)
        )

    # -- identity --

    @property
    def task(self) -> str:
        """``/job:worker/replica:0/task:1``."""
        return str(self._node.task)

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self._node.task.index

    @property
    def workers(self) -> int:
        """The number of workers in the job."""
        return self._node.cluster.shape.workers

    @property
    def servers(self) -> int:
        """The number of servers that hold the parameters; 0: every rank trains."""
        return self._node.cluster.shape.servers

    @property
    def is_chief(self) -> bool:
        """Whether initial parameters and learning rates come from this worker; a good one to print and save."""
        return self._node.task == CHIEF

    @property
    def step(self) -> Step:
        """The number of steps that have been made: with servers, that have been applied to the parameters; without,
        backward passes that have been averaged."""
        return self._training.step

    @property
    def device(self) -> torch.device:
        """Where this worker's model belongs: the GPU that is its own on this host, or the CPU if there is none."""
        return own_device(self._node.cluster)

    @property
    def not_finite_steps(self) -> int:
        """Steps in which a gradient contained NaN or infinity: one of this worker, or, without servers, the mean."""
        self._counts.catch_up()
        return self._counts.not_finite

    @property
    def void_steps(self) -> int:
        """Steps that this worker asked to skip (a gradient scaler found infinity, or ``on_nan="skip"``)."""
        return self._counts.void

    @property
    def missed_steps(self) -> int:
        """Steps that were completed without this worker (backup workers)."""
        return self._counts.missed

    # -- wrapping --

    @overload
    def wrap(self, model: Model, optimizer: torch.optim.Optimizer) -> tuple[Model, torch.optim.Optimizer]: ...

    @overload
    def wrap(
        self, model: Model, optimizer: Sequence[torch.optim.Optimizer]
    ) -> tuple[Model, list[torch.optim.Optimizer]]: ...

    def wrap(self, model: Model, optimizer: Any) -> tuple[Model, Any]:
        """Train this model and its optimizer (or several) together with the whole job.

        Blocks until the chief's initial parameters are in the model. Returns the same objects. Raises UsageError if
        they cannot be trained this way, and leaves them as they were; JobEndedError if the job ended meanwhile.
        """
        if self._wrapped:
            raise UsageError("job.wrap() was called twice; wrap everything at once: job.wrap(model, [first, second])")
        if self._course.in_steps or self._course.iteration:
            raise UsageError("job.wrap() was called after training began; call it before the loop over job.steps()")
        several = isinstance(optimizer, list | tuple)
        models = [model] if isinstance(model, nn.Module) else list(model)
        if self.on_wrap is not None:
            self.on_wrap(models, optimizer if several else [optimizer])
        try:
            wrapped = self._training.wrap(models, optimizer if several else [optimizer])
            self._wrapped = True
            spare_collector()
            if not any(parameter.is_cuda for model in models for parameter in model.parameters()):
                keep_freed_memory()
        finally:
            self._wrapped = self._wrapped or self._training.announced
        return model, wrapped if several else wrapped[0]

    @property
    def _in_child(self) -> bool:
        """Whether this is the copy of a job in a forked child process: it has no threads and no links."""
        return os.getpid() != self._process

    def _refuse_in_child(self, what: str) -> None:
        if self._in_child:
            raise UsageError(
                f"{what} was called in a forked process, which is not part of the job; call it in the process that "
                "called lockstep.join()"
            )

    # -- parameters and gradients --

    def publish(self) -> None:
        """Copy the chief's current parameters to all workers. Every worker must call it, at the same point.

        For programs that change parameters themselves (clipping weights, tying, resetting). With servers it takes an
        extra step. Blocks until it is done. With servers no call is needed after the model's ``load_state_dict``: the
        next step does it.
        """
        self._refuse_unwrapped("job.publish()")
        self._training.publish()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside this block add to ``grad`` on this worker only, as in DDP's ``no_sync``.

        The next backward pass outside averages everything that has been added up. Never blocks.
        """
        self._refuse_in_child("job.accumulate()")
        with self._training.accumulate():
            yield

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Tensor:
        """Clip the mean of all workers' gradients to this norm, as DDP and ``torch.nn.utils.clip_grad_norm_`` do.

        Call it after backward and before ``optimizer.step()``, on every worker; with several optimizers, name the one.
        Returns the norm before clipping. With servers they clip, ``grad`` must not be changed afterwards, and the norm
        is awaited when it is used; ``error_if_nonfinite`` waits for it at once.
        """
        self._refuse_unwrapped("job.clip_grad_norm_()")
        return self._training.clip_norm(NormClip(max_norm, norm_type, error_if_nonfinite, foreach, optimizer))

    def clip_grad_value_(
        self,
        clip_value: float,
        foreach: bool | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Clip each element of the mean of all workers' gradients; the rest as in ``clip_grad_norm_``. Never blocks."""
        self._refuse_unwrapped("job.clip_grad_value_()")
        self._training.clip_value(clip_value, optimizer, foreach)

    def _refuse_unwrapped(self, what: str) -> None:
        self._refuse_in_child(what)
        if not self._wrapped:
            raise UsageError(f"{what} was called before job.wrap(); call it after")

    # -- steps and data --

    def steps(self, count: int, *, seed: int | None = 0, data: DataShard | None = None) -> Iterator[int]:
        """Iterate over ``count`` steps. Each begins by seeding all random numbers from (seed, step, worker) alone;
        ``seed=None`` leaves them to the program, and a step that is repeated after a loss then draws others.

        ``data``, made by ``job.shard()``, is positioned at the step. With backup workers, steps that were completed
        without this worker are skipped, and so are steps that were made before this job, or this worker, was
        restarted. Never blocks itself; raises JobEndedError if the job has ended.
        """
        if count < 0:
            raise UsageError(f"job.steps({count}) is negative; give the number of steps to make")
        return self._course.steps(count, seed, data)

    def keep(self, **objects: Stateful) -> None:
        """Register what else changes from step to step: schedulers, scalers, your own objects.

        Takes anything with ``state_dict()`` and ``load_state_dict()``, by name. Its state is saved with every step, and
        restored when a worker or the job is restarted. Call it after ``job.wrap()`` and before the first loop. Never
        blocks.
        """
        self._course.keep(objects)

    @overload
    def shard(
        self, dataset: IterableDataset[Any], batch_size: int, **options: Unpack[ShardOptions]
    ) -> IterableShard: ...

    @overload
    def shard(self, dataset: MapStyle, batch_size: int, **options: Unpack[ShardOptions]) -> MapShard: ...

    @overload
    def shard(self, dataset: Iterable[Any], batch_size: int, **options: Unpack[ShardOptions]) -> IterableShard: ...

    def shard(self, dataset: Any, batch_size: int, **options: Unpack[ShardOptions]) -> MapShard | IterableShard:
        """This worker's share of a torch data set: disjoint, complete, ending on all workers at the same step.

        Options: ``shuffle`` (False), ``seed`` (0), ``drop_last`` (False), ``collate`` (torch's ``default_collate``).
        """
        made = make_shard(dataset, batch_size, (self.worker, self.workers), **options)
        made.on_taken = self._node.main.took
        if isinstance(made, MapShard):
            self._shards.add(made)
        return made

    # -- what workers tell each other --

    @overload
    def all_reduce(self, value: Tensor, op: str = "mean", *, name: str | None = None) -> Tensor: ...

    @overload
    def all_reduce(self, value: float, op: str = "mean", *, name: str | None = None) -> float: ...

    def all_reduce(self, value: Any, op: str = "mean", *, name: str | None = None) -> Any:
        """The mean, sum, max or min (``op``) of all workers' values, made in the order of workers; equal on all.

        A number or a tensor of any dtype, shape and device; the value itself is left as it is. Every worker must make
        the same call, at the same point. Blocks until all have; raises JobEndedError if the job ends first.
        """
        return self._talk.all_reduce(value, op, name)

    def broadcast(self, value: Any = None, source: int = 0, *, name: str | None = None) -> Any:
        """Worker ``source``'s value, on all workers. What the others pass does not count.

        Numbers, text, None, tensors, and lists, tuples and dictionaries of these. Blocks as ``all_reduce`` does.
        """
        return self._talk.broadcast(value, source, name)

    def gather(self, value: Any, *, name: str | None = None) -> list[Any]:
        """All workers' values in the order of workers, on all workers; they may differ in kind and shape.

        Takes what ``broadcast`` takes. Blocks as ``all_reduce`` does.
        """
        return self._talk.gather(value, name)

    def barrier(self, name: str | None = None) -> None:
        """Block until every worker has come here; raises JobEndedError if the job ends first."""
        self._talk.barrier(name)

    def process_group(self) -> ProcessGroup:
        """torch.distributed's global group of all workers, for programs that use torch.distributed themselves.

        It is made when this is first called, by all workers at the same point, unless the program has made it: NCCL for
        tensors on GPUs if each worker has its own, gloo for others. ``job.close()`` destroys it. Waits inside it are
        torch's own.
        """
        return self._group.get(self.device)

    # -- what takes long --

    @contextmanager
    def busy(self, what: str = "") -> Iterator[None]:
        """Announce that this block takes long and makes no step: an evaluation, an export, a download.

        However long it takes, the job does not end because of it; the others print a notice with ``what``. Never
        blocks. A step inside ends the announcement: from then on the usual times hold.
        """
        self._refuse_in_child("job.busy()")
        with self._node.main.during(Doing.BUSY, what):
            yield

    # -- the end --

    def close(self) -> None:
        """This worker has made all its steps. Blocks until every worker has; raises JobEndedError if the job failed.

        The model keeps the final parameters and is an ordinary model again. May be called twice. Does nothing in a
        forked process: the job belongs to the parent.
        """
        if self._closed or self._in_child:
            return
        try:
            self._course.settle()
            self._training.finish()
        finally:
            self._leave()

    def fail(self, reason: str | Reason) -> None:
        """End the whole job, because this worker cannot continue. Every task receives ``reason``."""
        if self._closed or self._in_child:
            return
        try:
            self._node.fail(reason if isinstance(reason, Reason) else own_error(reason))
        finally:
            self._leave()

    def _leave(self) -> None:
        self._closed = self._talk.closed = True
        if self._wrapped:  # otherwise what is left out is the program's own choice
            use_collector()
        self._training.release()
        self._group.close()
        self._node.close()
        self._on_close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, SystemExit):
            self._exits.caught(error)
        if error is None or (isinstance(error, SystemExit) and not self._exits.code):
            self.close()
        elif isinstance(error, JobEndedError) or self._left_by_signal() is not None:
            self._leave_quietly()
        else:
            self.fail(self._exits.reason() if isinstance(error, SystemExit) else why_it_left(error))

    def _left_by_signal(self) -> Departure | None:
        return None if self._node.outcome is None else self._node.outcome.departure

    def _leave_quietly(self) -> None:
        if not (self._closed or self._in_child):
            self._leave()

    def close_at_exit(self) -> None:
        """The program ends without closing the job: with an uncaught error, or because it forgot.

        This is called in a forked child too (``multiprocessing`` ends its children that way), and does nothing there.
        """
        if self._closed or self._in_child:
            return
        error = getattr(sys, "last_value", None)
        if isinstance(error, JobEndedError):
            self._leave_quietly()
        elif (departure := self._left_by_signal()) is not None:
            self._leave_quietly()
            sys.stdout.flush()
            os._exit(departure.exit_code)
        elif error is not None:
            self.fail(why_it_left(error))
        elif self._exits.code:
            self.fail(self._exits.reason())
        else:
            try:
                self.close()
            except JobEndedError:  # which has been said
                sys.stdout.flush()
                os._exit(EXIT_FAILED)  # too late for an exception to count: the program would end with 0
