"""The object that a program uses: one worker of a job, with the wrapped model and optimizer."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, overload
from weakref import WeakSet

import torch
from torch import nn
from torch.utils.data import IterableDataset

from lockstep.errors import EXIT_FAILED
from lockstep.library.atexit import ExitWitness, why_it_left
from lockstep.library.edit_guard import EditGuard
from lockstep.library.errors import UsageError
from lockstep.library.loop_position import LoopTracker
from lockstep.library.misuse import MisuseWatch
from lockstep.library.optimizer_proxy import unwrap_optimizer, wrap_optimizer
from lockstep.library.optimizer_state import RemoteState
from lockstep.library.optimizers import KnownOptimizer, known_optimizer
from lockstep.library.parameters import trained_parameters, untrained_digests
from lockstep.library.program_state import ProgramState
from lockstep.library.sharding import Collate, DataShard, IterableShard, MapShard, MapStyle, make_shard
from lockstep.library.state_codec import Stateful
from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.causes import Reason, own_error
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.protocol.core.leaving import Departure
from lockstep.protocol.core.messages import GroupRates
from lockstep.protocol.core.plan import DEFAULT_BUCKET_BYTES
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.worker.binding import BindingOptions
from lockstep.training.worker.sealed_replica import SealedReplica, SealedStep

Say = Callable[[str], None]
Model = TypeVar("Model", bound=nn.Module | Sequence[nn.Module])


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOptions:
    """Options of one task; what must be equal on all tasks is in the node's settings."""

    on_nan: str = "report"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    own_copy: bool = False


class Job:
    """One worker of a running cluster. Create it with ``lockstep.join()``; close it, or use it in a ``with`` block."""

    def __init__(
        self,
        node: WorkerNode,
        options: JobOptions,
        say: Say,
        on_close: Callable[[], None],
        exits: ExitWitness | None = None,
    ) -> None:
        self._node = node
        self._options = options
        self._say = say
        self._on_close = on_close
        self._exits = exits or ExitWitness()
        self._replica: SealedReplica | None = None
        self._optimizers: list[KnownOptimizer] = []
        self._models: list[nn.Module] = []
        self._state: RemoteState | None = None
        self._watch: EditGuard | None = None
        self._handles: list[Any] = []
        self._shards: WeakSet[MapShard] = WeakSet()
        self._loaded = False
        self._misuse: MisuseWatch | None = None
        self._course = LoopTracker(node, say)
        self._closed = False
        self._process = os.getpid()
        self.not_finite_steps = 0
        """Steps in which a gradient of this worker contained NaN or infinity."""
        self.void_steps = 0
        """Steps that this worker asked to skip (a gradient scaler found infinity, or ``on_nan="skip"``)."""
        self.missed_steps = 0
        """Steps that were completed without this worker (backup workers)."""

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
        return self._node.config.cluster.shape.workers

    @property
    def is_chief(self) -> bool:
        """Whether initial parameters and learning rates come from this worker; a good one to print and save."""
        return self._node.task == CHIEF

    @property
    def step(self) -> Step:
        """The number of steps that have been applied to the parameters."""
        return self._replica.step if self._replica is not None else 0

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
        they cannot be trained this way, and JobEndedError if the job ended meanwhile.
        """
        if self._replica is not None:
            raise UsageError("job.wrap() was called twice; wrap everything at once: job.wrap(model, [first, second])")
        if self._course.in_steps or self._course.iteration:
            raise UsageError("job.wrap() was called after training began; call it before the loop over job.steps()")
        several = isinstance(optimizer, list | tuple)
        self._models = [model] if isinstance(model, nn.Module) else list(model)
        for one in optimizer if several else [optimizer]:
            first = self._optimizers[-1].groups.stop if self._optimizers else 0
            self._optimizers.append(known_optimizer(one, first))
        self._bind()
        wrapped = [wrap_optimizer(known.optimizer, self) for known in self._optimizers]
        return model, wrapped if several else wrapped[0]

    def _bind(self) -> None:
        trained = trained_parameters(self._models, self._optimizers)
        entries = tuple(entry for known in self._optimizers for entry in known.entries())
        options = BindingOptions(
            bucket_bytes=self._options.bucket_bytes,
            own_copy=self._options.own_copy,
            apart=True,
            untrained=untrained_digests(self._models, trained),
        )
        hold = len(self._optimizers) > 1 or not self._node.config.synchronous
        self._node.phase(TaskPhase.COMPARING_SETTINGS)
        try:
            self._replica = SealedReplica(self._node, trained, entries, options, hold=hold)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._replica.start()
        state = ProgramState(self._models, self._optimizers, trained, describes=self.is_chief)
        self._course.begin(state, self._optimizers, self._replica.step)
        self.missed_steps = 0 if self._node.keeps_state else self._replica.step
        self._state = RemoteState(self._node, self._replica.plan, self._replica.bound_parameters())
        self._watch = EditGuard(self._replica.bound_parameters())
        self._watch.remember(self._replica.step)
        self._misuse = MisuseWatch(self._models, self._replica)
        self._hook_state()
        self._node.phase(TaskPhase.TRAINING)

    def _hook_state(self) -> None:
        """Saving and loading in the middle of training: the state is on the servers."""

        def loaded(*_: object) -> None:
            self._refuse_where_resumed("load_state_dict() of a model")
            self._loaded = True

        for model in self._models:
            self._handles += [part.register_load_state_dict_post_hook(loaded) for part in model.modules()]
        for known in self._optimizers:
            self._hook_optimizer_state(known)

    def _hook_optimizer_state(self, known: KnownOptimizer) -> None:
        def fetch(_: torch.optim.Optimizer) -> None:
            self._refuse_in_child("state_dict() of an optimizer")
            assert self._state is not None
            self._state.fetch(known)

        def forget(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            known.optimizer.state.clear()
            return saved

        def bring(_: torch.optim.Optimizer) -> None:
            self._refuse_without_common_step("load_state_dict() of an optimizer")
            self._refuse_where_resumed("load_state_dict() of an optimizer")
            assert self._state is not None
            if self.is_chief:
                self._state.bring(known)
            known.optimizer.state.clear()

        self._handles += [
            known.optimizer.register_state_dict_pre_hook(fetch),
            known.optimizer.register_state_dict_post_hook(forget),
            known.optimizer.register_load_state_dict_post_hook(bring),
        ]

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

    def _refuse_without_common_step(self, what: str) -> None:
        self._refuse_in_child(what)
        config = self._node.config
        if not config.synchronous or config.aggregate is not None:
            raise UsageError(
                f"{what} in the middle of training needs a step that all workers make together, and this job has none "
                "(asynchronous, or with backup workers); load before job.wrap()"
            )

    def _refuse_where_resumed(self, what: str) -> None:
        if self._course.resumed and not self._course.in_steps:
            raise UsageError(
                f"{what} would replace what this job has already trained: it resumes at step {self._course.iteration}; "
                "load before job.wrap(), so that loading only affects a job that starts from scratch"
            )

    # -- a step --

    def make_step(self, optimizer: torch.optim.Optimizer, void: bool, scales: bool = False) -> None:
        """What ``optimizer.step()`` does: hand over the gradients, and block until the next parameters arrive."""
        replica, known = self._checked(optimizer)
        self._exits.forget()
        self._course.scales = self._course.scales or scales
        if self._loaded:
            self._publish("load_state_dict()")
        rates = tuple(rate for one in self._optimizers for rate in one.rates())
        assert self._misuse is not None
        self._misuse.refuse_second_step(known)
        occasion = self._occasion(known)
        # Also when the job is to stop: a sealed step may be applied before the stop message reaches the servers.
        void_not_finite = self._options.on_nan in ("skip", "stop")
        self._course.before_step("optimizer.step()")
        sealed = replica.seal(rates, known.groups, void=void, void_not_finite=void_not_finite, occasion=occasion)
        self._course.after_step(sealed.step)
        self._misuse.sealed(known)
        self._judge(sealed)
        self._wait_for_next(replica)

    def _wait_for_next(self, replica: SealedReplica) -> None:
        former = replica.step
        replica.wait_for_next()
        missed = replica.step - former - 1
        self.missed_steps += missed
        self._course.iteration += missed
        if self._watch is not None:
            self._watch.remember(replica.step)

    def _occasion(self, known: KnownOptimizer) -> str:
        which = f" of optimizer {self._optimizers.index(known)}" if len(self._optimizers) > 1 else ""
        when = f" in step {self._course.iteration} of job.steps()" if self._course.in_steps else ""
        orders = sorted({shard.order_in(self._course.iteration) for shard in self._shards} - {""}) if when else []
        return f"step(){which}{when}{''.join(f' on {order}' for order in orders)}"

    def _judge(self, sealed: SealedStep) -> None:
        """Report the first gradient that is not finite; stop the job if ``on_nan`` asks for it."""
        self.void_steps += sealed.void
        if sealed.not_finite is None:
            return
        self.not_finite_steps += 1
        found = f"the gradient of {sealed.not_finite!r} contains NaN or infinity on {self.task} in step {sealed.step}"
        if self._options.on_nan == "stop":
            self._node.fail(own_error(f"stopped the job: {found}; on_nan is stop"))
            raise JobEndedError(self._node.wait_until_ended())
        if self.not_finite_steps == 1:
            then = "skipped by all workers" if sealed.void else "applied anyway"
            self._say(f"{found}; the step is {then}, and further ones are only counted")

    # -- misuse --

    def _checked(self, optimizer: torch.optim.Optimizer) -> tuple[SealedReplica, KnownOptimizer]:
        self._refuse_in_child("optimizer.step()")
        replica = self._replica
        known = next((one for one in self._optimizers if one.optimizer is optimizer), None)
        if self._closed or replica is None or known is None:
            raise UsageError("optimizer.step() was called after job.close(); call job.close() after the last step")
        assert self._misuse is not None
        self._misuse.check()
        if self._watch is not None and not self._loaded:
            self._watch.compare(replica.step)
        return replica, known

    # -- parameters that the program sets itself --

    def publish(self) -> None:
        """Copy the chief's current parameters to all workers. Every worker must call it, at the same point.

        For programs that change parameters themselves (clipping weights, tying, resetting). Takes an extra step and
        blocks until it is done. After the model's ``load_state_dict`` no call is needed: the next step does it.
        """
        if self._replica is None:
            raise UsageError("job.publish() was called before job.wrap(); call it after")
        self._publish("job.publish()")

    def _publish(self, occasion: str) -> None:
        assert self._replica is not None
        self._refuse_without_common_step(occasion)
        self._loaded = False
        self._course.before_step(occasion)
        step = self._replica.step
        rates: tuple[GroupRates, ...] = tuple(rate for one in self._optimizers for rate in one.rates())
        self._replica.publish_values(rates, occasion, lambda: self._course.after_step(step))
        if self._watch is not None:
            self._watch.remember(self._replica.step)

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
        self,
        dataset: IterableDataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> IterableShard: ...

    @overload
    def shard(
        self,
        dataset: MapStyle,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> MapShard: ...

    @overload
    def shard(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> IterableShard: ...

    def shard(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        collate: Collate | None = None,
    ) -> MapShard | IterableShard:
        """This worker's share of a torch data set: disjoint, complete, ending on all workers at the same step."""
        place = (self.worker, self.workers)
        made = make_shard(dataset, batch_size, place, shuffle=shuffle, seed=seed, drop_last=drop_last, collate=collate)
        if isinstance(made, MapShard):
            self._shards.add(made)
        return made

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
            self._node.finish(self.step)
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
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for known in self._optimizers:
            unwrap_optimizer(known.optimizer)
        if self._replica is not None:
            self._replica.close()
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
            except JobEndedError as ended:
                self._say(str(ended))
                os._exit(EXIT_FAILED)  # too late for an exception to count: the program would end with 0
