"""Training on servers: ``optimizer.step()`` hands over the gradients, and the servers make the next parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep.library.edit_guard import EditGuard
from lockstep.library.errors import UsageError
from lockstep.library.misuse import MisuseWatch
from lockstep.library.optimizer_proxy import unwrap_optimizer, wrap_optimizer
from lockstep.library.optimizer_state import RemoteState
from lockstep.library.optimizers import KnownOptimizer, known_optimizer
from lockstep.library.parameters import trained_parameters, untrained_digests
from lockstep.library.program_state import ProgramState
from lockstep.library.training_way import JobParts
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.protocol.core.messages import GroupRates
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.bucket_size import fitting_bucket_bytes
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.binding import BindingOptions, Trained
from lockstep.training.worker.sealed_replica import SealedReplica, SealedStep


class ServedTraining:
    """One worker of a job with servers."""

    def __init__(self, node: WorkerNode, parts: JobParts) -> None:
        self._node = node
        self._parts = parts
        self._options = parts.options
        self._course = parts.course
        self._counts = parts.counts
        self._counts.catch_up = self._catch_up
        self.replica: SealedReplica | None = None
        self._optimizers: list[KnownOptimizer] = []
        self._models: list[nn.Module] = []
        self._state: RemoteState | None = None
        self._watch: EditGuard | None = None
        self._handles: list[Any] = []
        self._loaded = False
        self._misuse: MisuseWatch | None = None
        self._closed = False

    @property
    def step(self) -> Step:
        return self.replica.step if self.replica is not None else 0

    def wrap(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        self._models = list(models)
        for one in optimizers:
            first = self._optimizers[-1].groups.stop if self._optimizers else 0
            self._optimizers.append(known_optimizer(one, first))
        self._bind()
        return [wrap_optimizer(known.optimizer, self) for known in self._optimizers]

    def _bind(self) -> None:
        trained = trained_parameters(self._models, self._optimizers)
        entries = tuple(entry for known in self._optimizers for entry in known.entries())
        options = BindingOptions(
            bucket_bytes=self._options.bucket_bytes or self._fitting_bucket_bytes(trained),
            own_copy=self._options.own_copy,
            wire=WireFormat(self._options.wire_dtype),
            untrained=untrained_digests(self._models, trained),
        )
        hold = len(self._optimizers) > 1 or not self._node.config.synchronous
        self._node.phase(TaskPhase.COMPARING_SETTINGS)
        try:
            self.replica = SealedReplica(self._node, trained, entries, options, hold=hold, layers=self._models)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self.replica.start()
        state = ProgramState(self._models, self._optimizers, trained, describes=self._node.task == CHIEF)
        self._course.begin(state, self._optimizers, self.replica.step)
        self._counts.missed = 0 if self._node.keeps_state else self.replica.step
        self._state = RemoteState(self._node, self.replica.plan, self.replica.bound_parameters())
        self._watch = EditGuard(self.replica.bound_parameters())
        self._watch.remember(self.replica.step)
        self._misuse = MisuseWatch(self._models, self.replica)
        self._hook_state()
        self._node.phase(TaskPhase.TRAINING)

    def _fitting_bucket_bytes(self, trained: Sequence[Trained]) -> int:
        config = self._node.config
        model_bytes = sum(one.parameter.nbytes for one in trained)
        cluster = config.cluster
        return fitting_bucket_bytes(
            model_bytes, cluster.shape.servers, shares_memory=cluster.shares_memory, eager=config.eager
        )

    def _hook_state(self) -> None:
        """Saving and loading in the middle of training: the state is on the servers."""

        def loaded(*_: object) -> None:
            self._course.refuse_where_resumed("load_state_dict() of a model")
            self._loaded = True

        for model in self._models:
            self._handles += [part.register_load_state_dict_post_hook(loaded) for part in model.modules()]
        for known in self._optimizers:
            self._hook_optimizer_state(known)

    def _hook_optimizer_state(self, known: KnownOptimizer) -> None:
        def fetch(_: torch.optim.Optimizer) -> None:
            self._parts.refuse_in_child("state_dict() of an optimizer")
            self._applied_state().fetch(known)

        def forget(_: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            known.optimizer.state.clear()
            return saved

        def bring(_: torch.optim.Optimizer) -> None:
            self._refuse_without_common_step("load_state_dict() of an optimizer")
            self._course.refuse_where_resumed("load_state_dict() of an optimizer")
            state = self._applied_state()
            if self._node.task == CHIEF:
                state.bring(known)
            known.optimizer.state.clear()

        self._handles += [
            known.optimizer.register_state_dict_pre_hook(fetch),
            known.optimizer.register_state_dict_post_hook(forget),
            known.optimizer.register_load_state_dict_post_hook(bring),
        ]

    def _applied_state(self) -> RemoteState:
        """The servers' state, when they have applied the newest step."""
        assert self._state is not None
        assert self.replica is not None
        self.replica.settle()
        return self._state

    def _refuse_without_common_step(self, what: str) -> None:
        self._parts.refuse_in_child(what)
        config = self._node.config
        if not config.synchronous or config.aggregate is not None:
            raise UsageError(
                f"{what} in the middle of training needs a step that all workers make together, and this job has none "
                "(asynchronous, or with backup workers); load before job.wrap()"
            )

    # -- a step --

    def make_step(self, optimizer: torch.optim.Optimizer, void: bool, scales: bool = False) -> None:
        """What ``optimizer.step()`` does: hand over the gradients. New parameters arrive now, or when they are used."""
        replica, known = self._checked(optimizer)
        self._parts.exits.forget()
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
        self._course.after_step(replica.step)
        self._misuse.sealed(known)
        self._judge(sealed)
        self._wait_for_next(replica)

    def _wait_for_next(self, replica: SealedReplica) -> None:
        former = replica.step
        replica.wait_for_next(at_once=self._watch is None or self._watch.looks_at(former + 1))
        missed = replica.step - former - 1
        self._counts.missed += missed
        self._course.iteration += missed
        if self._watch is not None:
            self._watch.remember(replica.step)

    def _occasion(self, known: KnownOptimizer) -> str:
        which = f" of optimizer {self._optimizers.index(known)}" if len(self._optimizers) > 1 else ""
        when = f" in step {self._course.iteration} of job.steps()" if self._course.in_steps else ""
        orders = sorted({shard.order_in(self._course.iteration) for shard in self._parts.shards} - {""}) if when else []
        return f"step(){which}{when}{''.join(f' on {order}' for order in orders)}"

    def _judge(self, steps: Sequence[SealedStep]) -> None:
        for sealed in steps:
            self._counts.void += sealed.void
            if sealed.not_finite is not None:
                self._report(sealed)

    def _report(self, sealed: SealedStep) -> None:
        """A gradient is not finite: print the first; stop the job if ``on_nan`` asks for it."""
        self._counts.not_finite += 1
        found = (
            f"the gradient of {sealed.not_finite!r} contains NaN or infinity on {self._node.task} in step {sealed.step}"
        )
        if self._options.on_nan == "stop":
            self._node.fail(own_error(f"stopped the job: {found}; on_nan is stop"))
            raise JobEndedError(self._node.wait_until_ended())
        if self._counts.not_finite == 1:
            then = "skipped by all workers" if sealed.void else "applied anyway"
            self._parts.say(f"{found}; the step is {then}, and further ones are only counted")

    def _catch_up(self) -> None:
        """Count the last step too."""
        if self.replica is not None and not self._closed:
            self._judge(self.replica.read_late())

    # -- misuse --

    def _checked(self, optimizer: torch.optim.Optimizer) -> tuple[SealedReplica, KnownOptimizer]:
        self._parts.refuse_in_child("optimizer.step()")
        replica = self.replica
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
        if self.replica is None:
            raise UsageError("job.publish() was called before job.wrap(); call it after")
        self._publish("job.publish()")

    def _publish(self, occasion: str) -> None:
        assert self.replica is not None
        self._refuse_without_common_step(occasion)
        self._loaded = False
        self._course.before_step(occasion)
        step = self.replica.step
        rates: tuple[GroupRates, ...] = tuple(rate for one in self._optimizers for rate in one.rates())
        self.replica.publish_values(rates, occasion, lambda: self._course.after_step(step))
        if self._watch is not None:
            self._watch.remember(self.replica.step)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        # Nothing is averaged before optimizer.step() anyway.
        yield

    # -- the end --

    def finish(self) -> None:
        if self.replica is not None:
            self.replica.settle()
            self._catch_up()
        self._node.finish(self.step)

    def release(self) -> None:
        self._closed = True
        for handle in self._handles:
            handle.remove()
        for known in self._optimizers:
            unwrap_optimizer(known.optimizer)
        if self.replica is not None:
            self.replica.close()
