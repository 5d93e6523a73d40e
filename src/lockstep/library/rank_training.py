"""Training on every rank: the mean of all gradients is in ``grad`` when backward ends, and everything else is local.

The program's optimizer is left as it is. Hooks around its ``step`` only refuse what would make the ranks' parameters
drift apart, and count.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.library.clipping import norm_clip, parameters_of, value_clip
from lockstep.library.errors import UsageError
from lockstep.library.finite_parameters import FiniteParameters
from lockstep.library.own_loops import count_batches, own_loops
from lockstep.library.parameters import (
    OwnOptimizer,
    averaged_parameters,
    frozen_digests,
    model_buffers,
    own_optimizer,
    sparse_parameters,
    synchronises_statistics,
)
from lockstep.library.program_state import ProgramState
from lockstep.library.rank_averager import make_averager
from lockstep.library.rank_checkpoint import RankCheckpoint
from lockstep.library.rank_return import RankReturn
from lockstep.library.training_way import JobParts, NormClip
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.causes import Cause, own_error
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.protocol.core.loop_watch import LoopWatch
from lockstep.protocol.core.messages import LoopCount
from lockstep.protocol.phrases import other_calls
from lockstep.runtime import phrases
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.bucket_size import rank_bucket_bytes
from lockstep.training.copies import CopyAnswers, OwnHook
from lockstep.training.ranks.averager import NO_STATISTICS_ON_CPUS, Averager, ModelsDiffer
from lockstep.training.ranks.layout import RankLayout, lay_out
from lockstep.training.ranks.own_averager import OwnAverager
from lockstep.training.ranks.rank_replica import COMPARE_EVERY, GradientMisuse, LoopNumbers, RankReplica
from lockstep.training.ranks.sparse import numbers_of_gradient
from lockstep.training.torch_private import foreach_norm
from lockstep.training.worker.binding import Trained
from lockstep.training.worker.local_state import most_bytes


class RankTraining:
    """One rank of a job without servers."""

    def __init__(self, node: WorkerNode | CollectiveNode, parts: JobParts) -> None:
        self._node = node
        self._parts = parts
        self._models: list[nn.Module] = []
        self._optimizers: list[OwnOptimizer] = []
        self._frozen: list[Trained] = []
        self._averager: Averager | None = None
        self._return: RankReturn | None = None
        """Where a lost rank comes back."""
        self.replica: RankReplica | None = None
        self._accumulating = 0
        self._finite: FiniteParameters | None = None
        self._skips = False
        """This step's mean is not finite, and ``on_nan`` is skip."""
        self._handles: list[Any] = []
        self._copies: CopyAnswers | None = None
        self._stepped = False
        """A wrapped optimizer has made a step."""
        self._announced = False
        self._closed = False
        self._thread = 0
        """The program's own, in which it wrapped its model; a GPU's backward ends in another."""
        self._loop_watch = LoopWatch()
        self._loop_names: dict[int, str] = {}
        """By the numbers under which they travel."""

    @property
    def step(self) -> Step:
        return self.replica.step if self.replica is not None else 0

    @property
    def announced(self) -> bool:
        return self._announced

    def wrap(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        own = [own_optimizer(one) for one in optimizers]
        trained, frozen = averaged_parameters(models, own)
        device = _only_device(trained)
        if self._node.cluster.shape.workers > 1 and device.type == "cpu" and synchronises_statistics(models):
            raise UsageError(NO_STATISTICS_ON_CPUS)
        checkpoint = RankCheckpoint(trained, own) if self._node.saves else None
        if checkpoint is not None:
            checkpoint.refuse_what_cannot_be_saved()
        try:
            layout = lay_out(
                trained, model_buffers(models), self._node.cluster.shape.workers, self._bucket_bytes(trained)
            )
        except ValueError as error:
            raise UsageError(str(error)) from None
        # What follows cannot be taken back: the others are told of this model.
        self._models, self._optimizers, self._frozen = list(models), own, frozen
        try:
            self._bind(layout, device, checkpoint)
        except BaseException:
            self._give_back()
            self._models, self._optimizers, self._frozen = [], [], []
            self._averager, self.replica = None, None
            raise
        return [one.optimizer for one in own]

    def _bind(self, layout: RankLayout, device: torch.device, checkpoint: RankCheckpoint | None) -> None:
        self._node.phase(TaskPhase.COMPARING_SETTINGS)
        trained = layout.trained
        try:
            averager = make_averager(self._node, layout, device, self._parts.options, frozen_digests(self._frozen))
            self._averager, self._announced = averager, True
            if self._node.cluster.shape.workers > 1 and synchronises_statistics(self._models):
                averager.share_with_torch()
        except (ModelsDiffer, ValueError) as error:
            raise UsageError(str(error)) from None
        if isinstance(self._node, WorkerNode) and isinstance(averager, OwnAverager) and self._node.rules.ranks_return:
            self._return = RankReturn(self._node, trained, self._optimizers)
            averager.come_back_with(self._return)
            self._parts.options.save_slot.kept = self._return.kept
        if checkpoint is not None:
            self._begin_saving(checkpoint)
        self.replica = RankReplica(
            averager,
            layout,
            synchronises=self._synchronises,
            on_step=self._on_step,
            place=self._place,
            on_elsewhere=self._on_elsewhere,
            loops=self._loop_numbers,
            on_loops=self._compare_loops,
        )
        self.replica.expect_sparse(sparse_parameters(self._models))
        self.replica.start()
        if self._return is not None:
            self._return.begin()
        self._finite = FiniteParameters(self._node, self._parts, [(one.name, one.parameter) for one in trained])
        most = most_bytes(self._node.cluster.shape.workers, held=self._return is not None)
        describes = self._node.task == CHIEF
        state = ProgramState(self._models, self._optimizers, trained, describes=describes, most=most)
        self._parts.course.begin(state, self._optimizers, self.replica.step)
        if self._return is not None:
            self._parts.course.on_iteration = self._return.on_iteration
            if self._return.replayed is None:
                self._parts.course.owe(self.replica.step)
        self._handles = [h for number, one in enumerate(self._optimizers) for h in self._hook(one, number)]
        self._copies = CopyAnswers(self._models)
        self._thread = threading.get_ident()
        count_batches()
        self._handles += [
            part.register_load_state_dict_post_hook(OwnHook(self._loaded)) for m in self._models for part in m.modules()
        ]
        self._handles += [
            one.optimizer.register_load_state_dict_post_hook(self._loaded_optimizer) for one in self._optimizers
        ]
        self._node.phase(TaskPhase.TRAINING)

    def _bucket_bytes(self, trained: Sequence[Trained]) -> int:
        cluster, asked = self._node.cluster, self._parts.options.bucket_bytes
        return asked or rank_bucket_bytes(
            sum(one.parameter.nbytes for one in trained),
            cluster.shape.workers,
            shares_memory=cluster.shares_memory,
            carried_by_torch=cluster.carried_by_torch,
        )

    def _loaded(self, *_: object) -> None:
        self._parts.course.refuse_where_resumed("load_state_dict() of a model")

    def _loaded_optimizer(self, *_: object) -> None:
        if self._return is not None and self._return.restoring:
            return
        self._parts.course.refuse_where_resumed("load_state_dict() of an optimizer")

    def _begin_saving(self, checkpoint: RankCheckpoint) -> None:
        """Let rank 0's checkpoints be taken, and start from one if the job does."""
        node = self._node
        if node.task == CHIEF:
            self._parts.options.save_slot.take = checkpoint.take
        if node.checkpoint and (self._return is None or not self._return.late):
            checkpoint.put(node.config.train_dir, node.checkpoint)

    # -- backward --

    def _synchronises(self) -> bool:
        """Whether the backward pass that begins is averaged. DDP's attribute is honoured, for loops that set it."""
        self._parts.refuse_in_child("backward()")
        if self._closed:
            return False
        averages = not self._accumulating and all(getattr(m, "require_backward_grad_sync", True) for m in self._models)
        if averages:
            # Before anything is handed over: its step waits for this rank's state.
            self._parts.course.before_step("backward()")
        return averages

    def _place(self) -> int:
        """The iteration of ``job.steps()`` in which the program is; -1: it makes its own loop."""
        course = self._parts.course
        return course.iteration if course.in_steps else -1

    def _on_elsewhere(self, step: Step, mine: int, chiefs: int) -> None:
        """The chief made this step in another iteration of ``job.steps()``: one of the two left something out."""
        both = [f"backward() in step {place} of job.steps()" for place in (mine, chiefs)]
        reason = own_error(other_calls(step, both[0], CHIEF, both[1]), Cause.OUT_OF_STEP)
        raise JobEndedError(self._node.fail(reason))

    def _loop_numbers(self) -> list[LoopNumbers]:
        """Where the program is in loops of its own; ``job.steps()`` has a number that must be equal."""
        counts = () if self._parts.course.in_steps else own_loops(self._thread)
        numbers = [(zlib.crc32(one.name.encode()), one.iteration) for one in counts]
        self._loop_names |= {number: one.name for (number, _), one in zip(numbers, counts, strict=True)}
        return numbers

    def _compare_loops(self, step: Step, mine: Sequence[LoopNumbers], chiefs: Sequence[LoopNumbers]) -> None:
        """Tell if this rank or the chief has left out an iteration of its own loop; of the chief one rank tells."""
        if self._node.task == CHIEF:
            return
        for task, numbers in ((self._node.task, mine), (CHIEF, chiefs)):
            known = [LoopCount(self._loop_names[one], at) for one, at in numbers if one in self._loop_names]
            found = self._loop_watch.heard(task, step, known)
            if found is not None and (found.ahead != CHIEF or self._node.task.index == 1):
                self._parts.say(phrases.left_out(found))

    def _on_step(self, step: Step) -> None:
        """The means of ``step`` are in ``grad``."""
        self._parts.exits.forget()
        self._parts.course.after_step(step)
        self._parts.course.unapplied = True
        self._skips = False
        on_nan = self._parts.options.on_nan
        # Looking at numbers makes a GPU wait, so a mere report is made now and then.
        if on_nan != "report" or step < 2 or step % COMPARE_EVERY == 0:
            self._judge(step)

    def _judge(self, step: Step) -> None:
        assert self.replica is not None
        name = _first_not_finite(self.replica)
        if name is None:
            return
        counts, on_nan = self._parts.counts, self._parts.options.on_nan
        counts.not_finite += 1
        found = f"the mean gradient of {name!r} contains NaN or infinity in step {step}"
        if on_nan == "stop":
            self._node.fail(own_error(f"stopped the job: {found}; on_nan is stop"))
            self._node.raise_if_ended()
        self._skips = on_nan == "skip"
        counts.void += self._skips
        if counts.not_finite == 1 and self._node.task == CHIEF:
            then = "all ranks skip the step" if self._skips else "it is left to the program"
            self._parts.say(f"{found}; {then}, and further ones are only counted")

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    # -- optimizer.step() --

    def _hook(self, one: OwnOptimizer, number: int) -> list[Any]:
        def before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            by_place = len(args) > 1
            closure = args[1] if by_place else kwargs.get("closure")
            if closure is None:
                self._before_update(optimizer)
                return None

            def checked() -> Any:
                loss = closure()
                self._before_update(optimizer)
                return loss

            # Its backward is yet to come: Lightning makes every step this way.
            return ((args[0], checked), kwargs) if by_place else (args, {**kwargs, "closure": checked})

        def after(*_: object) -> None:
            self._stepped = True
            self._parts.course.unapplied = False
            if self._return is not None:
                self._return.on_stepped(number)

        return [one.optimizer.register_step_pre_hook(before), one.optimizer.register_step_post_hook(after)]

    def _before_update(self, optimizer: torch.optim.Optimizer) -> None:
        self._parts.refuse_in_child("optimizer.step()")
        if self._closed:
            raise UsageError("optimizer.step() was called after job.close(); call job.close() after the last step")
        assert self.replica is not None
        self._node.raise_if_ended()
        if self.replica.unshared:
            raise UsageError(
                "optimizer.step() would apply gradients of this rank alone: the last backward pass was made in "
                "job.accumulate(), or with require_backward_grad_sync=False; make the last one before each step "
                "outside of it"
            )
        for one in self._frozen:
            if one.parameter.grad is not None:
                raise UsageError(
                    f"parameter {one.name!r} was frozen when the model was wrapped, so its gradient is not averaged; "
                    "unfreeze it before job.wrap()"
                )
        if self._finite is not None:
            self._finite.look(self.step - 2)  # this step's gradients are averaged, and not applied yet
        if self._skips:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    # -- clipping: the mean is in ``grad`` already --

    def clip_norm(self, asked: NormClip) -> Tensor:
        parameters = self._averaged(asked.optimizer, "job.clip_grad_norm_()")
        norm_clip(asked.max_norm, asked.norm_type)
        return nn.utils.clip_grad_norm_(
            parameters, asked.max_norm, asked.norm_type, asked.error_if_nonfinite, asked.foreach
        )

    def clip_value(self, value: float, optimizer: torch.optim.Optimizer | None, foreach: bool | None) -> None:
        value_clip(value)
        nn.utils.clip_grad_value_(self._averaged(optimizer, "job.clip_grad_value_()"), value, foreach)

    def _averaged(self, optimizer: torch.optim.Optimizer | None, what: str) -> list[nn.Parameter]:
        """The parameters of this optimizer, whose gradients are means."""
        assert self.replica is not None
        if self.replica.unshared:
            raise UsageError(
                f"{what} would clip gradients of this rank alone: the last backward pass was made in job.accumulate(), "
                "or with require_backward_grad_sync=False; clip after the last one, which is made outside of it"
            )
        return parameters_of(self._models, [one.optimizer for one in self._optimizers], optimizer)

    # -- the rest --

    def publish(self) -> None:
        assert self.replica is not None
        self._parts.refuse_in_child("job.publish()")
        self._parts.course.before_step("job.publish()")
        step = self.replica.step
        try:
            self.replica.publish()
        except GradientMisuse as error:
            raise UsageError(str(error)) from None
        self._parts.course.after_step(step)

    def finish(self) -> None:
        if self._averager is None:
            # It never wrapped a model: the others would wait for it in vain.
            raise JobEndedError(self._node.fail(own_error("closed its job without having called job.wrap()")))
        if self._finite is not None:
            self._finite.look(self.step - 1, last=True)
        if self.step and not self._stepped and self._node.task == CHIEF and not self._parts.course.resumed:
            self._parts.say(
                f"{self.step} backward passes were averaged, but no wrapped optimizer made a step: unless the program "
                "updates its parameters itself, nothing was trained; call optimizer.step() after backward"
            )
        self._averager.leave(self.step)

    def release(self) -> None:
        self._closed = True
        self._give_back()

    def _give_back(self) -> None:
        """Model and optimizers are the program's own again, without anything of ours."""
        while self._handles:
            self._handles.pop().remove()
        if self._copies is not None:
            self._copies.close()
        if self.replica is not None:
            self.replica.close()
        elif self._averager is not None:
            self._averager.close()


def _only_device(trained: Sequence[Trained]) -> torch.device:
    devices = {one.parameter.device for one in trained}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model is on several devices ({names}); move all of it to one device")
    return next(iter(devices))


def _first_not_finite(replica: RankReplica) -> str | None:
    both = zip(replica.names, replica.parameters, strict=True)
    grads = [(name, numbers_of_gradient(p.grad)) for name, p in both if p.grad is not None]
    if not grads or bool(_sum_of([grad for _, grad in grads]).isfinite()):
        return None
    return next((name for name, grad in grads if not bool(grad.isfinite().all())), None)


def _sum_of(grads: Sequence[Tensor]) -> Tensor:
    """One number that is not finite if any of these is not; it may overflow, and then they are looked at one by one."""
    return torch.stack(foreach_norm([grad.detach() for grad in grads], 1)).sum()
