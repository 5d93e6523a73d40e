"""When a task counts as dead: the literal table."""

from __future__ import annotations

import itertools

import pytest

from lockstep.protocol.core.death import PROOFS, RULINGS, Ruling, Word, rule_on

CUT, HEARS, NONE = Word.UNREACHABLE, Word.HEARS, Word.NONE


@pytest.mark.parametrize(
    ("tasks", "words", "ruling"),
    [
        (2, (), Ruling.OPEN),
        (2, (CUT,), Ruling.OPEN),
        (2, (HEARS,), Ruling.ALIVE),
        (2, (Word.ENDED,), Ruling.DEAD),
        (2, (Word.ABSENT,), Ruling.DEAD),
        (2, (Word.REPLACED,), Ruling.DEAD),
        (3, (CUT, NONE), Ruling.OPEN),
        (3, (CUT, HEARS), Ruling.ALIVE),
        (3, (CUT, CUT), Ruling.DEAD),
        (4, (CUT, CUT, NONE), Ruling.OPEN),
        (4, (CUT, CUT, CUT), Ruling.DEAD),
        (4, (CUT, CUT, HEARS), Ruling.ALIVE),
        (5, (CUT, CUT, NONE, NONE), Ruling.OPEN),
        (5, (CUT, CUT, CUT, NONE), Ruling.DEAD),
        (9, (CUT,) * 7 + (HEARS,), Ruling.ALIVE),
        (9, (CUT,) * 7 + (Word.ENDED,), Ruling.DEAD),
        (9, (HEARS,) * 7 + (Word.REPLACED,), Ruling.DEAD),
        (9, (NONE,) * 8, Ruling.OPEN),
    ],
)
def test_the_words_of_the_others_decide(tasks: int, words: tuple[Word, ...], ruling: Ruling) -> None:
    assert rule_on(words, tasks) is ruling


def test_the_table_has_a_row_for_every_case() -> None:
    assert set(RULINGS) == set(itertools.product((True, False), repeat=3))


def test_less_than_a_majority_without_proof_never_makes_a_task_dead() -> None:
    for tasks in range(2, 8):
        for words in itertools.combinations_with_replacement(Word, tasks - 1):
            dead = rule_on(words, tasks) is Ruling.DEAD
            proven = not PROOFS.isdisjoint(words)
            assert dead == (proven or (HEARS not in words and words.count(CUT) > tasks // 2))
