"""What looking at parameters for NaN costs: the share of a step, for models of several sizes.

``python bench/parameter_watch.py [--seconds=2]`` trains a stack of linear layers with AdamW in this process and looks
at its parameters as a job does. It prints how long a look and a step take, how many steps had one, and their share of
the time, after the first steps, which all have one.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from lockstep.training.parameter_watch import FIRST_LOOKS, ParameterWatch

SIZES = (64, 512, 2048)


class Timed:
    """Adds up what the looks took."""

    def __init__(self, watch: ParameterWatch) -> None:
        self._watch = watch
        self.seconds, self.looks = 0.0, 0

    def look(self, step: int) -> None:
        before, began = self._watch.looks, time.perf_counter()
        self._watch.look(step)
        self.seconds += time.perf_counter() - began
        self.looks += self._watch.looks - before


def measure(width: int, seconds: float) -> str:
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    timed = Timed(ParameterWatch(list(model.named_parameters())))
    batch = torch.randn(16, width)

    def a_step(step: int) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        timed.look(step - 1)
        optimizer.step()

    for step in range(FIRST_LOOKS):
        a_step(step)
    timed.seconds, timed.looks = 0.0, 0
    began, step = time.perf_counter(), 0
    while (whole := time.perf_counter() - began) < seconds:
        a_step(step)
        step += 1
    count = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{count / 1e6:7.2f} M parameters: {1e3 * whole / step:8.2f} ms a step, "
        f"{1e3 * timed.seconds / max(1, timed.looks):6.2f} ms a look, "
        f"{timed.looks} looks in {step} steps, {100 * timed.seconds / whole:.2f} % of the time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for width in SIZES:
        print(measure(width, asked.seconds), flush=True)


if __name__ == "__main__":
    main()
