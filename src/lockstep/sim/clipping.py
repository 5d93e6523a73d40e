"""Steps whose mean is clipped by its norm: which ones, what a simulated store measures, and what must come of it.

Every gradient has a norm that follows from its worker, bucket, step and edition. So a scale that was made of other
gradients than those that are applied, or that differs between two servers, shows.
"""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.protocol.core.ids import Step
from lockstep.protocol.core.messages import Clip
from lockstep.protocol.core.norms import clipping_scale, combined
from lockstep.sim.memory import GradientTag
from lockstep.sim.numbers import mixed
from lockstep.sim.scenario import Scenario

CLIP = Clip(100.0, 2.0)


def questions_in(scenario: Scenario, step: Step) -> int:
    """How often every worker asks for the norm of this step; before a second time it edits its gradients."""
    possible = scenario.servers and scenario.mode.seals and scenario.mode.synchronous and scenario.aggregate is None
    draw = mixed("clipped", scenario.seed, step) % 1000 / 1000
    if not possible or draw >= scenario.training.clip_chance:
        return 0
    return 2 if scenario.training.edit_chance and mixed("again", scenario.seed, step) % 3 == 0 else 1


def norm_of(gradients: Iterable[GradientTag]) -> float:
    """The norm of the mean of one bucket."""
    return combined([float(_strength(one)) for one in gradients], CLIP.norm_type)


def scale_of(buckets: Iterable[Iterable[GradientTag]]) -> float:
    """What a step of all these is multiplied by."""
    return clipping_scale(combined([norm_of(one) for one in buckets], CLIP.norm_type), CLIP.limit)


def _strength(gradient: GradientTag) -> int:
    return mixed("norm", gradient.worker.index, gradient.step, gradient.bucket, gradient.edition) % 1000
