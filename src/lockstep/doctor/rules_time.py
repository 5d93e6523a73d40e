"""Which of the things that were seen still count. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.doctor.facts import Visit
from lockstep.protocol.reach import Reach

LATE_SECONDS = 1.0
"""Everybody looks again at whoever did not answer at least this often."""


@dataclass(frozen=True, slots=True)
class Story:
    """What somebody saw, when we heard of it, and how much older than that it may be."""

    heard_at: float
    visits: tuple[Visit, ...]
    age: float = LATE_SECONDS


def without_early_refusals(stories: Sequence[Story], first_heard: Mapping[str, float]) -> list[Visit]:
    """All visits, except for refusals that may be from before the one who refused was there.

    ``first_heard``: when each task gave its first sign to us, by itself. Doctors do not start in the same instant: one
    that was refused, and had nothing newer to tell after the other came up, says nothing about a firewall.
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
