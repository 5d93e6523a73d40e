"""Training on servers: ``optimizer.step()`` hands over the gradients, and the servers make the next parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.library.awaited_norm import AwaitedNorm
from lockstep.library.clipping import (
    CLIPS_ITS_OWN,
    NORM,
    VALUE,
    PendingClip,
    chosen_optimizer,
    mentions_own_clip,
    norm_clip,
    parameters_of,
    refuse_infinite,
    value_clip,
)
from lockstep.library.edit_guard import FIRST_STEPS, EditGuard
from lockstep.library.errors import UsageError
from lockstep.library.finite_parameters import FiniteParameters
from lockstep.library.misuse import MisuseWatch
from lockstep.library.optimizer_proxy import unwrap_optimizer, wrap_optimizer
from lockstep.library.optimizer_state import RemoteState
from lockstep.library.optimizers import KnownOptimizer, known_optimizer
from lockstep.library.own_loops import count_batches, own_loops
from lockstep.library.parameters import refuse_local_statistics, trained_parameters, untrained_digests
from lockstep.library.program_state import ProgramState
from lockstep.library.training_way import JobParts, NormClip
from lockstep.protocol.core.activity import Doing, TaskPhase
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import CHIEF, INITIAL_STEP, Step
from lockstep.protocol.core.messages import Clip, GroupRates, OptimizerEntry
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.bucket_size import fitting_bucket_bytes
from lockstep.training.copies import CopyAnswers, OwnHook
from lockstep.training.wire_format import WireFormat
from lockstep.training.worker.binding import BindingOptions, Trained
from lockstep.training.worker.local_state import most_bytes
from lockstep.training.worker.sealed_replica import SealedReplica, SealedStep

NEVER_STEPPED = (
    "made backward passes and never called step() of a wrapped optimizer, so nothing that it computed reached the "
    "others; call step() of an optimizer that job.wrap() was given after each backward pass"
)


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
        self._finite: FiniteParameters | None = None
        self._pending: PendingClip | None = None
        self._norm: AwaitedNorm | None = None
        """The norm that was asked for last."""
        self._looked_for_clipping = False
        self._copies: CopyAnswers | None = None
        self._stepped = False
        """This program has called ``optimizer.step()``, or ``job.publish()``."""
        self._passes = 0
        """Backward passes that added to the gradients of others."""
        self._announced = False
        self._closed = False

    @property
    def step(self) -> Step:
        return self.replica.step if self.replica is not None else 0

    @property
    def announced(self) -> bool:
        return self._announced

    def wrap(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        refuse_local_statistics(models, self._node.cluster.shape.workers)
        known: list[KnownOptimizer] = []
        for one in optimizers:
            known.append(known_optimizer(one, known[-1].groups.stop if known else 0))
        trained = trained_parameters(models, known)
        if any(one.has_made_steps() for one in known):
            self._refuse_without_common_step("job.wrap() of an optimizer that has made steps")
        entries = tuple(entry for one in known for entry in one.entries())
        options = BindingOptions(
            bucket_bytes=self._options.bucket_bytes or self._fitting_bucket_bytes(trained),
            own_copy=self._options.own_copy,
            wire=WireFormat(self._options.wire_dtype),
            untrained=untrained_digests(models, trained),
        )
        # What follows cannot be taken back: the others are told of this model.
        self._models, self._optimizers = list(models), known
        self._node.phase(TaskPhase.COMPARING_SETTINGS)
        try:
            self._bind(trained, entries, options)
        except BaseException:
            self._give_back()
            self._models, self._optimizers, self.replica = [], [], None
            raise
        return [wrap_optimizer(one.optimizer, self) for one in known]

    def _bind(self, trained: Sequence[Trained], entries: tuple[OptimizerEntry, ...], options: BindingOptions) -> None:
        hold = len(self._optimizers) > 1 or not self._node.config.synchronous
        try:
            self.replica = SealedReplica(self._node, trained, entries, options, hold=hold, layers=self._models)
        except ValueError as error:
            raise UsageError(str(error)) from None
        self._announced = True
        self.replica.start()
        node = self._node
        most = most_bytes(node.cluster.shape.workers, held=bool(node.config.recovery.server_replicas))
        state = ProgramState(self._models, self._optimizers, trained, describes=node.task == CHIEF, most=most)
        self._course.begin(state, self._optimizers, self.replica.step)
        self._counts.missed = 0 if self._node.keeps_state else self.replica.step
        self._state = RemoteState(self._node, self.replica.plan, self.replica.bound_parameters())
        self._take_over_state(self._state)
        self._watch = EditGuard(self.replica.bound_parameters())
        self._watch.remember(self.replica.step, always=True)
        self._misuse = MisuseWatch(self._models, self.replica)
        self._finite = FiniteParameters(self._node, self._parts, [(one.name, one.parameter) for one in trained])
        self.replica.on_second_backward = self._on_second_backward
        count_batches()
        self._copies = CopyAnswers(self._models, [one.parameter for one in trained])
        self._hook_state()
        self._node.phase(TaskPhase.TRAINING)

    def _take_over_state(self, servers: RemoteState) -> None:
        """What was loaded into the optimizers before goes to the servers, from the chief, as the parameters do.

        A job that goes on from a checkpoint has its own, and a chief that was restarted has sent it before, unless it
        was lost too early.
        """
        node = self._node
        brings = node.task == CHIEF and node.start_step <= 0 and not node.checkpoint
        for known in self._optimizers:
            if not known.has_made_steps():
                continue
            if brings:
                with node.main.during(Doing.BUSY, "sending the optimizer's state to the servers"):
                    servers.bring(known, only_missing=node.start_step > INITIAL_STEP)
            known.optimizer.state.clear()
        if node.config.synchronous and node.config.aggregate is None:
            # Before anybody asks for it, the servers have all of it. Only the chief knows whether there is any.
            self._parts.meet("job.wrap()")

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
            self._handles += [part.register_load_state_dict_post_hook(OwnHook(loaded)) for part in model.modules()]
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
            self._refuse_without_common_step("load_state_dict() of an optimizer in the middle of training")
            self._course.refuse_where_resumed("load_state_dict() of an optimizer")
            state = self._applied_state()
            if self._node.task == CHIEF:
                state.bring(known)
            known.optimizer.state.clear()
            # Otherwise another worker could ask for it, or go on, while the servers have only part of it.
            self._parts.meet("load_state_dict() of an optimizer")

        self._handles += [
            known.optimizer.register_state_dict_pre_hook(fetch),
            known.optimizer.register_state_dict_post_hook(forget),
            known.optimizer.register_load_state_dict_post_hook(bring),
        ]

    def state_for_a_copy(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What a copy of this optimizer consists of, with the state that the servers have."""
        self._parts.refuse_in_child("a copy of an optimizer")
        known = next(one for one in self._optimizers if one.optimizer is optimizer)
        self._applied_state().fetch(known)
        whole = {**optimizer.__getstate__(), "state": optimizer.state.copy()}
        optimizer.state.clear()
        return whole

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
                f"{what} needs a step that all workers make together, and this job has none (asynchronous, or with "
                "backup workers); load the model before job.wrap(), and begin with a new optimizer"
            )

    # -- a step --

    def make_step(self, optimizer: torch.optim.Optimizer, void: bool, scales: bool = False) -> None:
        """What ``optimizer.step()`` does: hand over the gradients. New parameters arrive now, or when they are used."""
        replica, known = self._checked(optimizer)
        self._stepped = True
        self._parts.exits.forget()
        self._course.scales = self._course.scales or scales
        if self._loaded:
            self._publish("load_state_dict()")
        rates = tuple(rate for one in self._optimizers for rate in one.rates())
        assert self._misuse is not None
        self._misuse.refuse_second_step(known)
        clip = self._due_clip(replica, known, scales=scales)
        if not any(one.by_norm for one in clip):
            self._settle_norm()  # a question that was given up is answered only while all workers still ask it
        occasion = self._occasion(known, *clip)
        # Also when the job is to stop: a sealed step may be applied before the stop message reaches the servers.
        void_not_finite = self._options.on_nan in ("skip", "stop")
        self._tell_of_clipping(replica, known, clip)
        self._look_at_parameters(replica)
        self._course.before_step("optimizer.step()")
        sealed = replica.seal(
            rates,
            known.groups,
            void=void,
            void_not_finite=void_not_finite,
            occasion=occasion,
            clip=clip,
            loops=() if self._course.in_steps else own_loops(threading.get_ident()),
        )
        self._course.after_step(replica.step)
        self._misuse.sealed(known)
        self._judge(sealed)
        self._wait_for_next(replica)

    def _look_at_parameters(self, replica: SealedReplica, *, last: bool = False) -> None:
        """They are all here, before the next step changes them."""
        replica.settle()
        if self._finite is not None:
            self._finite.look(replica.step - 1, last=last)

    def _wait_for_next(self, replica: SealedReplica) -> None:
        former = replica.step
        replica.wait_for_next(at_once=self._watch is None or self._watch.looks_at(former + 1))
        missed = replica.step - former - 1
        self._counts.missed += missed
        self._course.iteration += missed
        if self._watch is not None:
            self._watch.remember(replica.step)

    # -- clipping the mean --

    def clip_norm(self, asked: NormClip) -> Tensor:
        clip = norm_clip(asked.max_norm, asked.norm_type)
        replica, known = self._clipped(asked.optimizer, NORM)
        if not self._node.config.synchronous:  # each worker's gradient is applied by itself: there is no mean
            return nn.utils.clip_grad_norm_(
                self._parameters_of(known), asked.max_norm, asked.norm_type, asked.error_if_nonfinite, asked.foreach
            )
        self._settle_norm()
        find = replica.ask_norm(known.groups, clip, self._occasion(known, clip))
        norm = AwaitedNorm.on_its_way(find, self._parameters_of(known)[0])
        self._norm = norm
        if asked.error_if_nonfinite:
            refuse_infinite(norm.settle(), asked.norm_type)
        self._pending = PendingClip(clip, known)
        return norm

    def clip_value(self, value: float, optimizer: torch.optim.Optimizer | None, foreach: bool | None) -> None:
        clip = value_clip(value)
        replica, known = self._clipped(optimizer, VALUE)
        if not self._node.config.synchronous:
            nn.utils.clip_grad_value_(self._parameters_of(known), value, foreach)
            return
        replica.remember(known.groups)
        self._pending = PendingClip(clip, known)

    def _clipped(self, optimizer: torch.optim.Optimizer | None, what: str) -> tuple[SealedReplica, KnownOptimizer]:
        """What is clipped. UsageError if that is not possible now."""
        if self._node.config.aggregate is not None:
            raise UsageError(
                f"{what} clips the mean, and with backup workers (replicas_to_aggregate) it is not known of whose "
                "gradients that will be; omit replicas_to_aggregate, or clip each worker's own with torch.nn.utils"
            )
        replica, known = self._checked(chosen_optimizer([one.optimizer for one in self._optimizers], optimizer), what)
        if self._loaded:
            self._publish("load_state_dict()")
        former, self._pending = self._pending, None
        if former is not None and replica.first_edited(former.known.groups) is None:
            raise UsageError(
                f"{what} was called after {former.call}, for the same gradients; call one of them, once before each "
                "optimizer.step()"
            )
        return replica, known

    def _parameters_of(self, known: KnownOptimizer) -> list[nn.Parameter]:
        return parameters_of(self._models, [one.optimizer for one in self._optimizers], known.optimizer)

    def _due_clip(self, replica: SealedReplica, known: KnownOptimizer, *, scales: bool) -> tuple[Clip, ...]:
        """How this step is clipped. UsageError if its gradients are no longer those that were to be."""
        pending, self._pending = self._pending, None
        if pending is None:
            return ()
        if pending.known is not known:
            raise UsageError(
                f"{pending.call} was called for another optimizer than the one that makes this step; call it right "
                "before the step() of that optimizer"
            )
        name = replica.first_edited(known.groups)
        if name is not None:
            remedy = "call scaler.unscale_(optimizer) before it" if scales else "change gradients before it"
            raise UsageError(
                f"the gradient of {name!r} was changed after {pending.call}, which had sent it to the servers; {remedy}"
            )
        return (pending.clip,)

    def _settle_norm(self) -> None:
        """A worker asks for a norm only when it has heard the one before."""
        if self._norm is not None:
            self._norm.settle()
            self._norm = None

    def _tell_of_clipping(self, replica: SealedReplica, known: KnownOptimizer, clip: tuple[Clip, ...]) -> None:
        """Once, on the chief: a program that clips with torch's own functions does not do what DDP does."""
        scaled = getattr(known.optimizer, "grad_scale", None) is not None  # then the wrapped optimizer has changed them
        if clip or scaled or self._looked_for_clipping or self._node.task != CHIEF:
            return
        if not replica.changed_after_backward:
            return
        self._looked_for_clipping = True  # once: the code of a program stays what it is
        if self._node.config.synchronous and self._node.cluster.shape.workers > 1 and mentions_own_clip():
            self._parts.say(CLIPS_ITS_OWN)

    def _occasion(self, known: KnownOptimizer, clip: Clip | None = None) -> str:
        which = f" of optimizer {self._optimizers.index(known)}" if len(self._optimizers) > 1 else ""
        when = f" in step {self._course.iteration} of job.steps()" if self._course.in_steps else ""
        orders = sorted({shard.order_in(self._course.iteration) for shard in self._parts.shards} - {""}) if when else []
        clipped = "" if clip is None else f", clipped to {'norm' if clip.by_norm else 'value'} {clip.limit:g}"
        return f"step(){which}{when}{''.join(f' on {order}' for order in orders)}{clipped}"

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

    def _on_second_backward(self) -> None:
        """Backward again, before this worker's first step: gradients add up, or the program updates by itself."""
        self._passes += 1
        if self._stepped or self._loaded or self._passes > FIRST_STEPS:
            return
        assert self._misuse is not None
        assert self._watch is not None
        self._misuse.check()
        changed = self._watch.first_changed()
        if changed is not None:
            raise UsageError(
                f"your program changed parameter {changed!r} without a call of the wrapped optimizer's step(), so "
                "this worker would train alone; call step() of the optimizer that job.wrap() was given after each "
                "backward pass, and update parameters in no other way"
            )

    def _checked(
        self, optimizer: torch.optim.Optimizer, what: str = "optimizer.step()"
    ) -> tuple[SealedReplica, KnownOptimizer]:
        self._parts.refuse_in_child(what)
        replica = self.replica
        known = next((one for one in self._optimizers if one.optimizer is optimizer), None)
        if self._closed or replica is None or known is None:
            raise UsageError(f"{what} was called after job.close(); call job.close() after the last step")
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
        self._loaded, self._stepped = False, True
        self._course.before_step(occasion)
        step = self.replica.step
        rates: tuple[GroupRates, ...] = tuple(rate for one in self._optimizers for rate in one.rates())
        self.replica.publish_values(rates, occasion, lambda: self._course.after_step(step))
        if self._watch is not None:
            self._watch.remember(self.replica.step)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Nothing is averaged before optimizer.step(); what is still being added to need not be sent."""
        if self.replica is None:
            yield
            return
        self.replica.accumulating += 1
        try:
            yield
        finally:
            self.replica.accumulating -= 1

    # -- the end --

    def finish(self) -> None:
        replica = self.replica
        if replica is not None:
            if replica.backward_since_step and not self._stepped:
                raise JobEndedError(self._node.fail(own_error(NEVER_STEPPED)))
            self._look_at_parameters(replica, last=True)
            self._settle_norm()
            replica.settle()
            self._catch_up()
        self._node.finish(self.step)

    def release(self) -> None:
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        """Model and optimizers are the program's own again, without anything of ours."""
        while self._handles:
            self._handles.pop().remove()
        for known in self._optimizers:
            unwrap_optimizer(known.optimizer)
        if self._copies is not None:
            self._copies.close()
        if self.replica is not None:
            self.replica.close()
