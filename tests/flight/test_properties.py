"""Random jobs with one fault: whoever is named is the rank with the fault, and a healthy job has none."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from flight.jobs import STOP, PaperJob, Planned
from lockstep.flight.account import Account, Explanation
from lockstep.flight.analysis import account_of
from lockstep.flight.diagnosis import diagnosis_of

BACKENDS = st.sampled_from(["nccl", "gloo"])


@dataclass(frozen=True)
class Drawn:
    """A healthy job, and where a fault may go."""

    groups: dict[str, tuple[int, ...]]
    plans: dict[int, list[Planned]]
    odd: int
    place: int

    def faulty(self, plan: list[Planned], backend: str) -> PaperJob:
        return PaperJob(self.groups, {**self.plans, self.odd: plan}, backend).run()

    @property
    def own(self) -> list[Planned]:
        return self.plans[self.odd]


@st.composite
def jobs(draw: st.DrawFn) -> Drawn:
    ranks = draw(st.integers(2, 5))
    groups = {"0": tuple(range(ranks))}
    for name in ("a", "b"):
        members = draw(st.sets(st.integers(0, ranks - 1), min_size=2))
        groups[name] = tuple(sorted(members))
    order = draw(st.lists(st.sampled_from(sorted(groups)), min_size=2, max_size=12))
    operations = st.sampled_from(["all_reduce", "broadcast", "all_gather"])
    calls = [Planned(name, draw(operations), draw(st.integers(1, 3))) for name in order]
    plans = {rank: [call for call in calls if rank in groups[call.group]] for rank in range(ranks)}
    odd = draw(st.sampled_from([rank for rank, plan in plans.items() if plan] or [0]))
    return Drawn(groups, plans, odd, draw(st.integers(0, max(0, len(plans[odd]) - 1))))


def named(one: Account) -> set[int]:
    """Whoever the account points to."""
    if one.difference is not None:
        return {rank for side in one.difference.sides for rank in side.ranks}
    if one.ring:
        return {leg.rank for leg in one.ring}
    if one.order is not None:
        return {one.order.rank, one.order.other}
    return set(one.culprits)


@settings(max_examples=150)
@given(jobs(), BACKENDS, st.integers(1, 20))
def test_a_healthy_job_has_no_culprit_however_short_its_rings(drawn: Drawn, backend: str, kept: int) -> None:
    done = PaperJob(drawn.groups, drawn.plans, backend).run()
    assert not done.waiting()
    one = account_of(done.recordings(kept))
    assert (one.kind, one.stuck, one.also) == (Explanation.NOTHING, (), ())


@settings(max_examples=150)
@given(jobs(), st.integers(1, 20))
def test_a_rank_that_stops_is_the_only_culprit(drawn: Drawn, kept: int) -> None:
    done = drawn.faulty([*drawn.own[: drawn.place], STOP], "nccl")
    one = account_of(done.recordings(kept))
    if not done.waiting():
        assert one.kind is Explanation.NOTHING
    else:
        assert one.culprits == (drawn.odd,)
        # A ring that is too short for the group of the call tells nothing of the rank, and is not said to.
        assert one.kind is Explanation.NOT_ENTERED or (one.kind is Explanation.UNCLEAR and one.wrapped)


@settings(max_examples=150)
@given(jobs())
def test_without_members_in_the_dumps_nobody_else_is_said_to_be_missing(drawn: Drawn) -> None:
    done = drawn.faulty([*drawn.own[: drawn.place], STOP], "gloo")
    one = account_of(done.recordings())
    if one.kind is Explanation.NOT_ENTERED:
        assert one.culprits == (drawn.odd,)
    elif done.waiting():
        assert one.kind is Explanation.OUTSIDERS
        assert drawn.odd in one.culprits


@settings(max_examples=150)
@given(jobs(), BACKENDS, st.sampled_from(["operation", "elements", "dtype"]))
def test_another_call_is_a_difference_at_that_very_number(drawn: Drawn, backend: str, what: str) -> None:
    changed = {"operation": "reduce", "elements": 99, "dtype": "Int"}[what]
    plan = list(drawn.own)
    if not plan:
        return
    plan[drawn.place] = replace(plan[drawn.place], **{what: changed})  # type: ignore[arg-type]
    one = account_of(drawn.faulty(plan, backend).recordings())
    assert one.kind is Explanation.DIFFERENCE
    assert one.difference is not None
    group = plan[drawn.place].group
    assert one.difference.collective.group.name == group
    assert one.difference.collective.number == sum(call.group == group for call in plan[: drawn.place + 1])
    assert one.difference.aspect.value == {"elements": "size"}.get(what, what)
    assert drawn.odd in named(one)
    if len(drawn.groups[group]) > 2:
        assert one.difference.odd == (drawn.odd,)


@settings(max_examples=150)
@given(jobs())
def test_two_groups_in_another_order_never_accuse_a_third_rank_alone(drawn: Drawn) -> None:
    plan = list(drawn.own)
    if drawn.place + 1 >= len(plan):
        return
    plan[drawn.place], plan[drawn.place + 1] = plan[drawn.place + 1], plan[drawn.place]
    done = drawn.faulty(plan, "nccl")
    one = account_of(done.recordings())
    if done.waiting():
        assert one.kind in (Explanation.RING, Explanation.DIFFERENCE)
        assert drawn.odd in named(one)
    else:
        assert one.kind is Explanation.NOTHING


@settings(max_examples=100)
@given(jobs(), BACKENDS, st.randoms(use_true_random=False), st.sets(st.integers(0, 4)))
def test_any_part_of_the_dumps_in_any_order_gives_one_account_that_can_be_told(
    drawn: Drawn, backend: str, chance: random.Random, gone: set[int]
) -> None:
    done = drawn.faulty([*drawn.own[: drawn.place], STOP], backend)
    kept = [(rank, one) for rank, one in done.recordings(4).items() if rank not in gone]
    one = account_of(dict(kept))
    chance.shuffle(kept)
    assert account_of(dict(kept)) == one
    diagnosis = diagnosis_of(one)
    assert diagnosis.healthy is (one.kind is Explanation.NOTHING)
    assert not set(one.no_dump) & {rank for rank, _ in kept}
    if one.kind is Explanation.NOT_ENTERED:
        assert one.culprits == (drawn.odd,)
