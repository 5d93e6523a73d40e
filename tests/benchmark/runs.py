"""Small runs of the benchmark in this process, on the built-in digits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.benchmark.outputs.observers import RunObserver
from lockstep.benchmark.training.job import BenchJob
from lockstep.benchmark.training.loop import BenchResult, train
from lockstep.benchmark.training.run import choose_devices, single_updates
from lockstep.cli.flags import parse_bench

BASE = ("--device=cpu", "--data_name=digits", "--model=lenet", "--batch_size=4", "--num_warmup_batches=0")


class NoProgress:
    def stage(self, what: str) -> None: ...

    def warm_up(self, done: int, total: int) -> None: ...

    def step(self, done: int, total: int, images_per_second: float) -> None: ...

    def evaluation(self, done: int, total: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class Ran:
    """What a run left."""

    result: BenchResult
    job: BenchJob
    lines: list[str] = field(default_factory=list)

    def parameters(self, tower: int = 0) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.job.towers.models[tower].named_parameters()}


def run(*flags: str, steps: int = 3, base: tuple[str, ...] = BASE, observer: RunObserver | None = None) -> Ran:
    """Train so many steps with these flags."""
    length = () if any(flag.startswith("--num_epochs") for flag in flags) else (f"--num_batches={steps}",)
    config = parse_bench([*base, *length, *flags], {})
    lines: list[str] = []
    job = BenchJob(config, 0, choose_devices(config))
    try:
        result = train(job, single_updates(job), lines.append, NoProgress(), observer)
    finally:
        job.close()
    return Ran(result, job, lines)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def by_hand(
    steps: int, *, lanes: int = 1, rate: float = 0.05, decay: float = 4e-5, batch: int = 4, late: bool = False
) -> dict[str, Tensor]:
    """SGD on the digits written out: each step the mean of the lanes' gradients, w -= rate * (mean + decay * w)."""
    from lockstep.benchmark.data.digits import digits_source
    from lockstep.benchmark.data.order import TrainingOrder
    from lockstep.benchmark.models import build_model

    source = digits_source("train")
    torch.manual_seed(1234)
    model = build_model("lenet", "digits", 10)
    picked = [index * 8 // 28 for index in range(28)]
    orders = [TrainingOrder(len(source), batch, lane, lanes, 1234) for lane in range(lanes)]
    kept: list[Tensor] | None = None
    for step in range(steps):
        sums: list[Tensor] | None = None
        for order in orders:
            chosen = [place.index for place in order.places(step)]
            pixels = source.pixels[chosen][:, picked][:, :, picked]
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1.0
            model.zero_grad()
            logits = model(images.contiguous())
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(source.labels[chosen])).backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            sums = gradients if sums is None else [a + b for a, b in zip(sums, gradients, strict=True)]
        assert sums is not None
        fresh = [one / lanes for one in sums]
        now, kept = (kept, fresh) if late else (fresh, None)
        if now is None:
            continue
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), now, strict=True):
                parameter.sub_(rate * (gradient + decay * parameter))
    return {name: value.detach() for name, value in model.named_parameters()}
