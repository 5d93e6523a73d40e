"""A failing run is made short, and the command that is printed repeats it."""

from __future__ import annotations

import pickle
import shlex
from dataclasses import replace

import pytest

from lockstep.cli.sim import parse
from lockstep.protocol.core.faults import Freeze, SlowSteps
from lockstep.protocol.core.ids import worker
from lockstep.sim.explore import play_seed
from lockstep.sim.faults import parse_fault
from lockstep.sim.generate import Size, draw_run
from lockstep.sim.scenario import Mishap
from lockstep.sim.shrink import Recipe, Shrinker, fewest
from lockstep.sim.violation import BrokenRule, Rule, Violation, with_story
from sim import mutants
from sim.mutants import Plant


@pytest.mark.parametrize("needed", [set(), {3}, {0, 19}, {2, 3, 11}, set(range(20))])
def test_what_is_left_fails_and_nothing_of_it_can_be_left_out(needed: set[int]) -> None:
    assert set(fewest(range(20), lambda part: needed <= set(part))) == needed


def test_violations_of_one_rule_are_alike_whatever_they_say() -> None:
    one = Violation(Rule.APPLIED_TWICE, "bucket 3 is applied a second time for step 12")
    assert one.broken == Violation(Rule.APPLIED_TWICE, "").broken
    assert one.broken != Violation(Rule.IN_PLACE, str(one)).broken


def test_a_machines_own_rules_are_told_apart_by_where_they_are_checked() -> None:
    """They have no other name than their line of code."""

    def checked(number: int) -> BrokenRule:
        try:
            assert number % 2, f"{number} is even"
            assert number < 0, f"{number} is positive"
        except AssertionError as error:
            return with_story(error, "").broken
        raise AssertionError("one of the two fails")

    assert checked(2) == checked(4)
    assert checked(3) == checked(5)
    assert checked(2) != checked(3)


def test_a_violation_comes_whole_out_of_another_process() -> None:
    found = pickle.loads(pickle.dumps(with_story(Violation(Rule.NO_END, "it goes on"), "at 1.0 s")))
    assert isinstance(found, Violation)
    assert (found.broken, str(found)) == (BrokenRule(Rule.NO_END), "it goes on\nat 1.0 s")


def test_a_run_that_breaks_a_rule_is_not_sound_although_nothing_is_said_of_it() -> None:
    played = play_seed(0, Size(1, 1, 1), faults=())
    assert played.sound
    assert not replace(played, broken=BrokenRule(Rule.NO_END), violation="").sound


def test_a_failing_run_shrinks_to_a_short_plan_that_fails_in_the_same_way() -> None:
    size, maker = Size(4, 2, 3), Plant(mutants.CountsAnyLife)
    failing = next(p for seed in range(200) if not (p := play_seed(seed, size, maker=maker)).sound)
    assert len(failing.mishaps) > 5, "there is something to leave out"
    recipe = Shrinker(failing, size, maker).shrink()
    assert len(recipe.mishaps) + len(recipe.faults) <= 2
    again = recipe.play(maker)
    assert again.broken == failing.broken
    assert again.broken is not None
    assert recipe.play().sound, "the sound machines pass the same run"


def test_the_printed_command_says_everything_that_repeats_a_run() -> None:
    mishap = Mishap("late", "worker 1", "ps 0", 17, 8.213)
    faults = (Freeze(str(worker(1)), 2), SlowSteps(str(worker(0))))
    recipe = Recipe(7, Size(3, 2, 4), faults, (mishap,))
    words = shlex.split(recipe.command())
    assert words[:2] == ["lockstep", "sim"]
    asked = parse(words[2:])
    assert (asked.whole("seed", 0), asked.whole("workers", 0), asked.servers(0), asked.whole("steps", 0)) == (
        7,
        3,
        2,
        4,
    )
    assert tuple(parse_fault(text) for text in asked.texts["fault"]) == faults
    assert [Mishap.parse(text) for text in asked.texts["mishap"]] == [mishap]


def test_a_run_by_its_own_mishaps_is_the_same_run() -> None:
    """By chance and by plan give the same events, so that leaving one out changes only what it touched."""
    for seed in range(6):
        drawn = play_seed(seed, Size())
        planned = Recipe(seed, Size(), draw_run(seed, Size()).faults, drawn.mishaps).play()
        assert (planned.seconds, planned.events, planned.mishaps) == (drawn.seconds, drawn.events, drawn.mishaps)


@pytest.mark.parametrize("text", ["late", "late,a,b,x", "late,a,b,1,2,3"])
def test_what_is_no_mishap_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a mishap like"):
        Mishap.parse(text)
