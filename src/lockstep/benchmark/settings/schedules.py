"""The learning rate of a step: pure functions of the step, the batch and the size of the data set.

The flags and formulas are those of tf_cnn_benchmarks: ``--piecewise_learning_rate_schedule`` takes precedence over
``--init_learning_rate`` with its decay, and that over the model's own rate; the warm-up applies to the first two.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from lockstep.benchmark.models.catalogue import LearningRate
from lockstep.benchmark.settings.features import ScheduleConfig


class BadSchedule(ValueError):  # noqa: N818 - reads as the fact it states
    """A schedule cannot be read; the text says why."""


def parse_piecewise(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Rates and the epochs between them, from ``LR0;E1;LR1;...``."""
    words = text.split(";")
    if len(words) % 2 == 0:
        raise BadSchedule(f"it has {len(words)} parts, but needs an odd number: LR0;E1;LR1;E2;LR2")
    try:
        numbers = [float(word) for word in words]
    except ValueError:
        raise BadSchedule("it contains something that is not a number; write, for example, 0.1;30;0.01") from None
    rates, epochs = tuple(numbers[0::2]), tuple(numbers[1::2])
    if any(later <= earlier for earlier, later in itertools.pairwise(epochs)):
        raise BadSchedule("its epochs do not increase; write, for example, 0.1;30;0.01;60;0.001")
    if any(rate < 0 for rate in rates) or any(epoch <= 0 for epoch in epochs):
        raise BadSchedule("it contains a negative number; rates must be 0 or more, epochs above 0")
    return rates, epochs


@dataclass(frozen=True, slots=True)
class Rate:
    """The learning rate of one run."""

    schedule: ScheduleConfig
    constant: float | None
    """``--init_learning_rate``."""
    own: LearningRate
    """The model's."""

    def at(self, step: int, global_batch: int, images_per_epoch: int) -> float:
        """The rate of ``step``, counted from 0 with the warm-up steps of the benchmark."""
        steps_per_epoch = images_per_epoch / global_batch
        if self.schedule.piecewise is not None:
            rates, epochs = parse_piecewise(self.schedule.piecewise)
            passed = sum(step >= int(steps_per_epoch * epoch) for epoch in epochs)
            return self._warmed(rates[0], rates[passed], step, steps_per_epoch)
        if self.constant is not None:
            return self._warmed(
                self.constant, self._decayed(self.constant, step, steps_per_epoch), step, steps_per_epoch
            )
        own = self.own
        if self.schedule.resnet_base_lr is not None and own.base_batch is not None:
            own = dataclasses.replace(own, base=self.schedule.resnet_base_lr)
        return own.at(step, global_batch, images_per_epoch)

    def _decayed(self, rate: float, step: int, steps_per_epoch: float) -> float:
        schedule = self.schedule
        if not schedule.num_epochs_per_decay or not schedule.decay_factor:
            return rate
        decay_steps = max(1, int(steps_per_epoch * schedule.num_epochs_per_decay))
        return max(rate * schedule.decay_factor ** (step // decay_steps), schedule.minimum)

    def _warmed(self, first: float, rate: float, step: int, steps_per_epoch: float) -> float:
        warmup_steps = int(steps_per_epoch * self.schedule.warmup_epochs)
        return first * step / warmup_steps if step < warmup_steps else rate
