"""Is a task dead? One task that cannot reach it is not enough: the fault may lie in the network between the two.

Proof is what its monitor reports, what its own host reports, or its next incarnation. Without proof a majority of all
tasks must be unable to reach it, the task itself included in their number. Of two tasks one is never a majority, so
there only proof counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Word(StrEnum):
    """What one task knows of another."""

    ENDED = "its monitor reports its end"
    ABSENT = "on its own host nothing listens at its address"
    REPLACED = "another incarnation of it is there"
    HEARS = "hears from it, or from its monitor"
    UNREACHABLE = "cannot reach it"
    NONE = "knows nothing"


class Ruling(StrEnum):
    """What follows from the words of all."""

    DEAD = "dead"
    ALIVE = "alive"
    OPEN = "open"
    """Neither is known: it may come back."""


PROOFS: Final = frozenset({Word.ENDED, Word.ABSENT, Word.REPLACED})

RULINGS: Final = MappingProxyType(
    {
        # proven, heard, unreachable for a majority
        (True, True, True): Ruling.DEAD,
        (True, True, False): Ruling.DEAD,  # what was heard is seconds old, or of the next incarnation
        (True, False, True): Ruling.DEAD,
        (True, False, False): Ruling.DEAD,
        (False, True, True): Ruling.ALIVE,  # the network is cut, and more of the tasks are on the other side
        (False, True, False): Ruling.ALIVE,
        (False, False, True): Ruling.DEAD,
        (False, False, False): Ruling.OPEN,
    }
)


def rule_on(words: Iterable[Word], tasks: int) -> Ruling:
    """The ruling on one incarnation of a task. ``words``: one per other task; ``tasks``: how many the job has."""
    said = list(words)
    proven = any(word in PROOFS for word in said)
    return RULINGS[proven, Word.HEARS in said, 2 * said.count(Word.UNREACHABLE) > tasks]
