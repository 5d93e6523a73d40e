"""Training on every rank: the mean of all gradients is in ``grad`` when backward ends, and everything else is local.

The program's optimizer is left as it is. Hooks around its ``step`` only refuse what would make the ranks' parameters
drift apart, and count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.library.errors import UsageError
from lockstep.library.parameters import (
    OwnOptimizer,
    averaged_parameters,
    model_buffers,
    own_optimizer,
    untrained_digests,
)
from lockstep.library.program_state import ProgramState
from lockstep.library.rank_averager import make_averager
from lockstep.library.rank_checkpoint import RankCheckpoint
from lockstep.library.training_way import JobParts
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.causes import own_error
from lockstep.protocol.core.ids import CHIEF, Step
from lockstep.runtime.task.collective_node import CollectiveNode
from lockstep.runtime.task.outcome import JobEndedError
from lockstep.runtime.task.rank_node import RankNode
from lockstep.training.bucket_size import rank_bucket_bytes
from lockstep.training.ranks.averager import Averager, ModelsDiffer
from lockstep.training.ranks.layout import lay_out
from lockstep.training.ranks.rank_replica import COMPARE_EVERY, GradientMisuse, RankReplica
from lockstep.training.worker.binding import Trained


class RankTraining:
    """One rank of a job without servers."""

    def __init__(self, node: RankNode | CollectiveNode, parts: JobParts) -> None:
        self._node = node
        self._parts = parts
        self._models: list[nn.Module] = []
        self._optimizers: list[OwnOptimizer] = []
        self._frozen: list[Trained] = []
        self._averager: Averager | None = None
        self.replica: RankReplica | None = None
        self._accumulating = 0
        self._skips = False
        """This step's mean is not finite, and ``on_nan`` is skip."""
        self._handles: list[Any] = []
        self._closed = False

    @property
    def step(self) -> Step:
        return self.replica.step if self.replica is not None else 0

    def wrap(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> list[torch.optim.Optimizer]:
        self._models = list(models)
        self._optimizers = [own_optimizer(one) for one in optimizers]
        self._node.phase(TaskPhase.COMPARING_SETTINGS)
        trained, self._frozen = averaged_parameters(self._models, self._optimizers)
        device = _only_device(trained)
        buffers = model_buffers(self._models)
        options, frozen = self._parts.options, untrained_digests(self._models, trained, buffers=False)
        try:
            layout = lay_out(trained, buffers, self._node.cluster.shape.workers, self._bucket_bytes(trained))
            averager = make_averager(self._node, layout, device, options, frozen)
            if self._node.cluster.shape.workers > 1 and _synchronises_statistics(self._models):
                averager.share_with_torch()
        except (ModelsDiffer, ValueError) as error:
            raise UsageError(str(error)) from None
        self._averager = averager
        self._begin_saving(trained)
        self.replica = RankReplica(averager, layout, synchronises=self._synchronises, on_step=self._on_step)
        self.replica.start()
        state = ProgramState(self._models, self._optimizers, trained, describes=self._node.task == CHIEF)
        self._parts.course.begin(state, self._optimizers, self.replica.step)
        self._handles = [handle for one in self._optimizers for handle in self._hook(one)]
        self._handles += [
            part.register_load_state_dict_post_hook(self._loaded) for m in self._models for part in m.modules()
        ]
        self._handles += [
            one.optimizer.register_load_state_dict_post_hook(self._loaded_optimizer) for one in self._optimizers
        ]
        self._node.phase(TaskPhase.TRAINING)
        return [one.optimizer for one in self._optimizers]

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
        self._parts.course.refuse_where_resumed("load_state_dict() of an optimizer")

    def _begin_saving(self, trained: Sequence[Trained]) -> None:
        """Where the job writes checkpoints: let rank 0's be taken, and start from one if the job does."""
        node = self._node
        if not node.saves:
            return
        checkpoint = RankCheckpoint(trained, self._optimizers)
        checkpoint.refuse_what_cannot_be_saved()
        if node.task == CHIEF:
            self._parts.options.save_slot.take = checkpoint.take
        if node.checkpoint:
            checkpoint.put(node.config.train_dir, node.checkpoint)

    # -- backward --

    def _synchronises(self) -> bool:
        """Whether the backward pass that begins is averaged. DDP's attribute is honoured, for loops that set it."""
        self._parts.refuse_in_child("backward()")
        if self._closed:
            return False
        return not self._accumulating and all(getattr(m, "require_backward_grad_sync", True) for m in self._models)

    def _on_step(self, step: Step) -> None:
        """The means of ``step`` are in ``grad``."""
        self._parts.exits.forget()
        self._parts.course.before_step("backward()")
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

    def _hook(self, one: OwnOptimizer) -> list[Any]:
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
            self._parts.course.unapplied = False

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
        if self._skips:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    # -- the rest --

    def publish(self) -> None:
        assert self.replica is not None
        self._parts.refuse_in_child("job.publish()")
        try:
            self.replica.publish()
        except GradientMisuse as error:
            raise UsageError(str(error)) from None

    def finish(self) -> None:
        if self._averager is None:
            # It never wrapped a model: the others would wait for it in vain.
            raise JobEndedError(self._node.fail(own_error("closed its job without having called job.wrap()")))
        self._averager.leave(self.step)

    def release(self) -> None:
        self._closed = True
        for handle in self._handles:
            handle.remove()
        if self.replica is not None:
            self.replica.close()


def _synchronises_statistics(models: Sequence[nn.Module]) -> bool:
    """Whether a model has layers that talk to other ranks through torch.distributed's own group."""
    return any(isinstance(part, nn.SyncBatchNorm) for model in models for part in model.modules())


def _only_device(trained: Sequence[Trained]) -> torch.device:
    devices = {one.parameter.device for one in trained}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(f"the model is on several devices ({names}); move all of it to one device")
    return next(iter(devices))


def _first_not_finite(replica: RankReplica) -> str | None:
    grads = [(name, p.grad) for name, p in zip(replica.names, replica.parameters, strict=True) if p.grad is not None]
    if not grads or bool(_sum_of([grad for _, grad in grads]).isfinite()):
        return None
    return next((name for name, grad in grads if not bool(grad.isfinite().all())), None)


def _sum_of(grads: Sequence[Tensor]) -> Tensor:
    """One number that is not finite if any of these is not; it may overflow, and then they are looked at one by one."""
    return torch.stack(torch._foreach_norm([grad.detach() for grad in grads], 1)).sum()
