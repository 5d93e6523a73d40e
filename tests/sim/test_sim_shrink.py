"""A failing run is made short, and the command that is printed repeats it."""

from __future__ import annotations

import shlex

import pytest

from lockstep.cli.sim import parse
from lockstep.protocol.faults import Freeze, SlowSteps
from lockstep.protocol.ids import worker
from lockstep.sim.draw import Size, draw_run
from lockstep.sim.explore import play_seed
from lockstep.sim.faults import parse_fault
from lockstep.sim.scenario import Mishap
from lockstep.sim.shrink import Recipe, Shrinker, fewest, kind_of
from sim import mutants
from sim.mutants import Plant


@pytest.mark.parametrize("needed", [set(), {3}, {0, 19}, {2, 3, 11}, set(range(20))])
def test_what_is_left_fails_and_nothing_of_it_can_be_left_out(needed: set[int]) -> None:
    assert set(fewest(range(20), lambda part: needed <= set(part))) == needed


def test_violations_of_one_kind_are_alike_whatever_their_numbers() -> None:
    one = "bucket 3 is applied a second time for step 12"
    assert kind_of(one) == kind_of("bucket 1 is applied a second time for step 0")
    assert kind_of(one) != kind_of("step 2 updates bucket 3 in place")


def test_a_failing_run_shrinks_to_a_short_plan_that_fails_in_the_same_way() -> None:
    size, maker = Size(4, 2, 3), Plant(mutants.CountsAnyLife)
    failing = next(p for seed in range(200) if not (p := play_seed(seed, size, maker=maker)).sound)
    assert len(failing.mishaps) > 5, "there is something to leave out"
    recipe = Shrinker(failing, size, maker).shrink()
    assert len(recipe.mishaps) + len(recipe.faults) <= 2
    again = recipe.play(maker)
    assert kind_of(again.headline) == kind_of(failing.headline)
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
    with pytest.raises(ValueError, match="is no mishap like"):
        Mishap.parse(text)
