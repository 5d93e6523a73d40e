"""A job without Lockstep, for comparisons: the program runs as one process, or PyTorch's DDP averages its gradients.

It has the methods of ``Job``, so that the program need not know. The model stays the same object, as with Lockstep:
calls of it pass through DDP.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import EXIT_FAILED
from lockstep.library.clipping import parameters_of
from lockstep.library.errors import UsageError
from lockstep.library.loop_position import seed_everything
from lockstep.library.sharding import DataShard, IterableShard, MapShard, ShardOptions, make_shard, step_seed
from lockstep.library.state_codec import Stateful
from lockstep.library.talking import Talk
from lockstep.protocol.core.calls import OUTSIDE_LOOPS
from lockstep.protocol.core.ids import worker
from lockstep.protocol.core.messages import CallComplete, CallMade
from lockstep.protocol.core.timing import STARTUP_SECONDS
from lockstep.runtime.compared import Shape
from lockstep.terminal import say
from lockstep.training.torch_private import c10d

OnWrap = Callable[[Sequence[nn.Module], Sequence[torch.optim.Optimizer]], None]


class StandInJob:
    """One process of a comparison that does not use Lockstep."""

    def __init__(self, shape: Shape, environ: Mapping[str, str]) -> None:
        self._ddp = shape is Shape.DDP
        self.worker = int(environ["RANK"])
        self.workers = int(environ["WORLD_SIZE"]) if self._ddp else 1
        self.servers = 0
        self.on_wrap: OnWrap | None = None
        self._models: list[DistributedDataParallel] = []
        self._parameters: list[nn.Parameter] = []
        self._wrapped: tuple[list[nn.Module], list[torch.optim.Optimizer]] = ([], [])
        self._forwards = 0
        self._iteration = 0
        self.step = 0
        self.not_finite_steps = self.void_steps = self.missed_steps = 0
        outside = (0, OUTSIDE_LOOPS)
        self._talk = Talk(self.worker % self.workers, self.workers, self._carry, lambda: outside, lambda _: None)
        if self._ddp:
            own_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= self.workers
            distributed.init_process_group(
                "cpu:gloo,cuda:nccl" if own_gpus else "gloo",
                rank=self.worker,
                world_size=self.workers,
                timeout=timedelta(seconds=STARTUP_SECONDS),
            )
            if own_gpus:
                torch.cuda.set_device(self.device)

    # -- identity --

    @property
    def task(self) -> str:
        return str(worker(self.worker))

    @property
    def is_chief(self) -> bool:
        return self.worker == 0

    @property
    def device(self) -> torch.device:
        """The GPU of this process, shared if there are fewer than processes; the CPU if there is none."""
        if not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.worker % torch.cuda.device_count())

    # -- training --

    def wrap(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Put each model into DDP, in place."""
        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._parameters = [parameter for one in models for parameter in one.parameters()]
        self._wrapped = (models, optimizers)
        if self.on_wrap is not None:
            self.on_wrap(models, optimizers)
        if self._ddp:
            self._models = [self._in_ddp(one) for one in models]
        for one in optimizers:
            one.register_step_pre_hook(self._before_step)
        return model, optimizer

    def _in_ddp(self, model: nn.Module) -> DistributedDataParallel:
        through = DistributedDataParallel(_Forward(model))

        def forward(*args: Any, **kwargs: Any) -> Any:
            self._forwards += torch.is_grad_enabled()
            return through(*args, **kwargs)

        # Not an attribute that torch would register: DDP contains the model, not the other way round.
        object.__setattr__(model, "forward", forward)
        return through

    def _before_step(self, *_: object) -> None:
        """DDP averages only what passed through it; a step of anything else would be measured for nothing."""
        if self._ddp and not self._forwards:
            raise UsageError(
                "this program cannot be compared under DDP: it made a step without calling its wrapped model (only "
                "model(...) passes through DDP, not its other methods); leave it out with --only"
            )
        self._forwards = 0
        self.step += 1

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside are not averaged; the next one outside averages the sum."""
        with contextlib.ExitStack() as stack:
            for model in self._models:
                stack.enter_context(model.no_sync())
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
        parameters = parameters_of(*self._wrapped, optimizer)
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    def clip_grad_value_(
        self,
        clip_value: float,
        foreach: bool | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        nn.utils.clip_grad_value_(parameters_of(*self._wrapped, optimizer), clip_value, foreach)

    def publish(self) -> None:
        """The chief's parameters for all."""
        if self._ddp:
            for parameter in self._parameters:
                distributed.broadcast(parameter.data, src=0)

    # -- steps and data --

    def steps(self, count: int, *, seed: int | None = 0, data: DataShard | None = None) -> Iterator[int]:
        """As ``Job.steps``: every step has random numbers of its own, unless ``seed`` leaves them to the program."""
        for step in range(self._iteration, self._iteration + count):
            self._iteration = step + 1
            if seed is not None:
                seed_everything(step_seed(seed, step, self.worker))
            if data is not None:
                data.position(step)
            yield step

    def keep(self, **objects: Stateful) -> None:
        """Nothing is saved in a comparison."""

    def shard(self, dataset: Any, batch_size: int, **options: Unpack[ShardOptions]) -> MapShard | IterableShard:
        return make_shard(dataset, batch_size, (self.worker % self.workers, self.workers), **options)

    # -- what workers tell each other --

    def all_reduce(self, value: Any, op: str = "mean", *, name: str | None = None) -> Any:
        return self._talk.all_reduce(value, op, name)

    def broadcast(self, value: Any = None, source: int = 0, *, name: str | None = None) -> Any:
        return self._talk.broadcast(value, source, name)

    def gather(self, value: Any, *, name: str | None = None) -> list[Any]:
        return self._talk.gather(value, name)

    def barrier(self, name: str | None = None) -> None:
        self._talk.barrier(name)

    def process_group(self) -> distributed.ProcessGroup:
        """The group in which DDP averages; a single process makes one of its own."""
        if not distributed.is_initialized():
            distributed.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
        group = distributed.group.WORLD
        assert group is not None
        return group

    def _carry(self, made: CallMade) -> CallComplete:
        """Bytes of different lengths, all of which gloo makes equally long."""
        workers = tuple(range(self.workers))
        if not self._ddp:
            return CallComplete(made.place, workers, (made.data,))
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in workers]
        distributed.all_gather(lengths, torch.tensor([len(made.data)]))
        own = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        own[: len(made.data)] = torch.tensor(list(made.data), dtype=torch.uint8)
        found = [torch.zeros_like(own) for _ in workers]
        distributed.all_gather(found, own)
        values = tuple(bytes(one[: int(n)].tolist()) for one, n in zip(found, lengths, strict=True))
        return CallComplete(made.place, workers, values)

    @contextlib.contextmanager
    def busy(self, what: str = "") -> Iterator[None]:  # noqa: ARG002 - nobody watches
        yield

    # -- the end --

    def close(self) -> None:
        # First what DDP keeps: if that outlives its group, the process may abort or hang at its end (torch 2.13, gloo).
        if self._models:
            for model in self._wrapped[0]:
                model.__dict__.pop("forward", None)
            self._models.clear()
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def fail(self, reason: object) -> None:
        """End this process; the comparison ends the others."""
        say(str(reason))
        sys.exit(EXIT_FAILED)

    def __enter__(self) -> StandInJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or isinstance(error, SystemExit):
            self.close()


class _Forward(nn.Module):
    """What DDP calls: the model's own forward, without its hooks, which the program's call has already run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._forward = model.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
