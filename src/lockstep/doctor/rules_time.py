"""Which of the visits still count, given when they were made. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.facts import Visit
from lockstep.protocol.core.reach import Reach

LATE_SECONDS = 1.0
"""Every doctor visits tasks that did not answer again at least this often."""


@dataclass(frozen=True, slots=True)
class Story:
    """What one doctor saw, when its report arrived here, and how much older than that it may be."""

    heard_at: float
    visits: tuple[Visit, ...]
    age: float = LATE_SECONDS


def without_early_refusals(stories: Sequence[Story], first_heard: Mapping[str, float]) -> list[Visit]:
    """All visits, except refusals that may date from before the refusing task was up.

    ``first_heard``: when each task itself first contacted us. Doctors do not start at the same instant: one that was
    refused, and reported nothing newer after the other came up, does not point to a firewall.
    """
    there_since = dict(first_heard)
    for story in stories:
        for visit in story.visits:
            if visit.reached:
                there_since[visit.host] = min(story.heard_at, there_since.get(visit.host, story.heard_at))
    return [
        visit
        for story in stories
        for visit in story.visits
        if visit.answer is not Reach.REFUSED
        or visit.host not in there_since
        or story.heard_at - story.age >= there_since[visit.host]
    ]
