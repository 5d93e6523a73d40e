"""The rule, on real dumps and on jobs on paper."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flight.jobs import STOP, PaperJob, Planned, ended, recorded, steps
from flight.samples import account
from lockstep.flight.account import Account, Aspect, Explanation, Standing
from lockstep.flight.analysis import account_of
from lockstep.flight.groups import Membership
from lockstep.flight.recording import CallState, RecordedCall, Recording, Tensors

ALL = (0, 1, 2)


def job(*plans: list[Planned], backend: str = "nccl", **groups: tuple[int, ...]) -> PaperJob:
    every = {"0": tuple(range(len(plans)))} | {name.strip("_"): ranks for name, ranks in groups.items()}
    return PaperJob(every, dict(enumerate(plans)), backend).run()


# -- real dumps --


@pytest.mark.parametrize("name", ["gloo-healthy", "gloo-2.15-healthy", "nccl-one-rank-healthy"])
def test_a_healthy_job_is_healthy(name: str, tmp_path: Path) -> None:
    assert account(name, tmp_path).kind is Explanation.NOTHING


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gloo-slept", 5),
        ("gloo-slept-json", 5),
        ("gloo-2.15-slept", 5),
        ("gloo-2.15-slept-json", 5),
        ("gloo-wrapped", 22),
    ],
)
def test_a_rank_that_stays_in_its_own_code_never_entered(name: str, number: int, tmp_path: Path) -> None:
    one = account(name, tmp_path)
    assert (one.kind, one.culprits) == (Explanation.NOT_ENTERED, (1,))
    assert one.root is not None
    assert (one.root.waiting, one.root.collective.operation, one.root.collective.number) == (
        (0, 2),
        "all_reduce",
        number,
    )
    assert one.root.collective.group.membership is Membership.EVERYBODY
    assert dict(one.wrapped) == ({0: 14, 1: 13, 2: 14} if name == "gloo-wrapped" else {})


def test_gloo_retires_a_call_that_timed_out_and_it_is_still_seen_as_failed(tmp_path: Path) -> None:
    one = account("gloo-gave-up", tmp_path)
    assert (one.kind, one.culprits) == (Explanation.NOT_ENTERED, (1,))
    assert one.root is not None
    assert one.root.ranks(Standing.GIVEN_UP) == (0, 2)


@pytest.mark.parametrize(
    ("name", "aspect", "over"),
    [
        ("gloo-skipped", Aspect.OPERATION, False),
        ("gloo-shape", Aspect.SIZE, False),
        ("gloo-dtype", Aspect.DTYPE, True),
        ("gloo-2.15-skipped", Aspect.OPERATION, False),
        ("gloo-2.15-shape", Aspect.SIZE, False),
        ("gloo-2.15-dtype", Aspect.DTYPE, True),
    ],
)
def test_a_rank_that_calls_something_else_is_named(name: str, aspect: Aspect, over: bool, tmp_path: Path) -> None:
    one = account(name, tmp_path)
    assert one.kind is Explanation.DIFFERENCE
    assert one.difference is not None
    assert (one.difference.aspect, one.difference.odd, one.difference.over) == (aspect, (1,), over)
    assert one.difference.collective.number == 5


@pytest.mark.parametrize("name", ["gloo-order", "gloo-2.15-order"])
def test_groups_in_opposite_order_are_a_ring(name: str, tmp_path: Path) -> None:
    one = account(name, tmp_path)
    assert one.kind is Explanation.RING
    assert [(leg.rank, leg.stuck.collective.group.description, leg.on) for leg in one.ring] == [
        (0, "evaluation", 1),
        (1, "checkpoint", 0),
    ]


def test_a_rank_that_died_left_no_dump(tmp_path: Path) -> None:
    one = account("gloo-died", tmp_path)
    assert (one.kind, one.culprits, one.no_dump) == (Explanation.NO_DUMP, (1,), (1,))


def test_where_a_ring_has_lost_the_group_nothing_is_claimed_of_its_rank(tmp_path: Path) -> None:
    one = account("gloo-wrapped-group", tmp_path)
    assert (one.kind, one.culprits) == (Explanation.OUTSIDERS, (1,))


def test_a_call_that_all_are_in_is_the_collective_itself(tmp_path: Path) -> None:
    one = account("nccl-one-rank-open", tmp_path)
    assert one.kind is Explanation.ITSELF
    assert one.root is not None
    assert one.root.collective.number == 7


# -- on paper --


def test_the_wait_is_followed_from_group_to_group() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2, which is in its own code."""
    one = account_of(
        job(
            [*steps(1), Planned("a")], [*steps(1), Planned("b"), Planned("a")], [*steps(1), STOP], a=(0, 1), b=(1, 2)
        ).recordings()
    )
    assert (one.kind, one.culprits) == (Explanation.NOT_ENTERED, (2,))
    assert one.root is not None
    assert one.root.collective.group.name == "b"
    assert len(one.stuck) == 2


def test_a_ring_of_three_is_found() -> None:
    plans = [[Planned("a"), Planned("c")], [Planned("b"), Planned("a")], [Planned("c"), Planned("b")]]
    one = account_of(job(*plans, a=(0, 1), b=(1, 2), c=(2, 0)).recordings())
    assert one.kind is Explanation.RING
    assert {leg.rank for leg in one.ring} == {0, 1, 2}


def test_calls_that_were_queued_in_opposite_order_are_a_deadlock() -> None:
    """As NCCL has it: all ranks have entered both, and no device gets through."""
    a, b = Planned("a"), Planned("b")
    recordings = {
        rank: Recording(
            rank=rank,
            calls=tuple(recorded(call, 1, place) for place, call in enumerate((b, a) if rank == 1 else (a, b))),
            members={"a": ALL, "b": ALL},
        )
        for rank in ALL
    }
    one = account_of(recordings)
    assert one.kind is Explanation.ORDER
    assert one.order is not None
    assert (one.order.rank, one.order.other) == (0, 1)
    assert {one.order.first.collective.group.name, one.order.second.collective.group.name} == {"a", "b"}


def test_a_missing_dump_is_said_to_be_missing_and_not_that_its_rank_never_entered() -> None:
    recordings = job([*steps(2)], [*steps(2)], [*steps(1), STOP]).recordings()
    del recordings[2]
    one = account_of(recordings)
    assert (one.kind, one.culprits, one.no_dump) == (Explanation.NO_DUMP, (2,), (2,))


def test_the_sizes_of_an_all_gather_tell_of_ranks_that_nobody_names() -> None:
    call = recorded(Planned("0", "all_gather", 3), 1, 0, "gloo")
    call = replace(call, outputs=Tensors(((4, 3),), ("Float",)))
    one = account_of({0: Recording(rank=0, calls=(call,)), 1: Recording(rank=1, calls=(call,))})
    assert (one.kind, one.no_dump) == (Explanation.NO_DUMP, (2, 3))


def test_a_call_that_some_have_done_is_about_to_end_unless_it_timed_out() -> None:
    recordings = job([*steps(2)], [*steps(2)]).recordings()
    recordings[1] = reopened(recordings[1])
    assert account_of(recordings).kind is Explanation.NOTHING
    recordings[1] = reopened(recordings[1], retired=True)
    one = account_of(recordings)
    assert one.kind is Explanation.ITSELF
    assert one.root is not None
    assert one.root.waiting == (1,)


def reopened(recording: Recording, retired: bool = False) -> Recording:
    last = replace(recording.calls[-1], state=CallState.SCHEDULED, retired=retired)
    return replace(recording, calls=(*recording.calls[:-1], last))


def test_a_dump_that_is_older_than_the_call_proves_nothing() -> None:
    recordings = job([*steps(3)], [*steps(2), STOP]).recordings()
    began = recordings[0].calls[-1].created
    late = {rank: replace(one, taken=began + 60) for rank, one in recordings.items()}
    assert account_of(late).kind is Explanation.NOT_ENTERED
    one = account_of(late | {1: replace(late[1], taken=began - 60)})
    assert (one.kind, one.culprits) == (Explanation.UNCLEAR, (1,))


def test_gloo_dumps_of_a_running_job_that_were_taken_one_after_the_other_prove_nothing() -> None:
    """Rank 0's has a call more, which is over; rank 1 has entered it after its own dump."""
    recordings = job([*steps(5)], [*steps(5)], backend="gloo").recordings()
    began = recordings[0].calls[-1].created
    recordings[1] = replace(recordings[1], calls=recordings[1].calls[:4], taken=began + 5)
    recordings[0] = replace(recordings[0], taken=began + 30)
    assert account_of(recordings).kind is Explanation.NOTHING
    for when in (began + 5.5, began + 601):  # at the same time; after the time that the call had
        assert account_of(recordings | {0: replace(recordings[0], taken=when)}).kind is Explanation.NOT_ENTERED


def test_a_dump_of_active_calls_only_does_not_make_a_rank_missing() -> None:
    recordings = job([*steps(6)], [*steps(5), STOP]).recordings()
    calls = recordings[1].calls
    filtered = recordings | {1: replace(recordings[1], calls=(calls[0], calls[2]))}
    one = account_of(filtered)
    assert (one.kind, one.culprits) == (Explanation.UNCLEAR, (1,))


def test_a_rank_whose_ring_has_wrapped_past_a_call_was_in_it() -> None:
    recordings = job([*steps(9)], [*steps(9)], [*steps(9)]).recordings(kept=3)
    recordings[0] = replace(recordings[0], calls=(reopened(Recording(rank=0, calls=recordings[0].calls[:1])).calls[0],))
    assert account_of(recordings).kind is Explanation.NOTHING


def test_the_oldest_call_of_a_wrapped_ring_is_not_compared() -> None:
    """A part of it may be gone: here a call that was put together from two."""
    whole = [recorded(Planned("0", name), 1, place) for place, name in enumerate(("_broadcast_oop", "coalesced"))]
    after = recorded(Planned("0"), 2, 2)
    recordings = {
        0: Recording(rank=0, calls=tuple(map(ended, (*whole, after))), members={"0": (0, 1)}),
        1: Recording(rank=1, calls=tuple(map(ended, (whole[1], after))), members={"0": (0, 1)}),
    }
    assert account_of(recordings).kind is Explanation.NOTHING


def between(rank: int, operation: str, source: int, target: int, done: bool = False) -> RecordedCall:
    call = replace(recorded(Planned("0", operation), 0, 0), p2p=True, p2p_number=1, source=source, target=target)
    return ended(call) if done else call


def two(*calls: RecordedCall | None) -> Account:
    return account_of(
        {rank: Recording(rank=rank, calls=(c,) if c else (), members={"0": ALL}) for rank, c in enumerate(calls)}
    )


def test_a_receive_waits_for_the_rank_that_does_not_send() -> None:
    one = two(None, between(1, "recv", 0, 1), None)
    assert (one.kind, one.culprits) == (Explanation.NOT_ENTERED, (0,))
    assert one.root is not None
    assert one.root.collective.peers == (0, 1)


def test_two_that_send_to_one_another_first_are_a_ring() -> None:
    assert two(between(0, "send", 0, 1), between(1, "send", 1, 0), None).kind is Explanation.RING


def test_a_send_and_its_receive_that_are_both_open_are_the_transfer_itself() -> None:
    assert two(between(0, "send", 0, 1), between(1, "recv", 0, 1), None).kind is Explanation.ITSELF


def test_a_send_that_is_done_is_nothing() -> None:
    assert two(between(0, "send", 0, 1, done=True), None, None).kind is Explanation.NOTHING


ROOT_ONLY = Tensors(((12,),), ("Float",))


@pytest.mark.parametrize(
    ("operation", "root"),
    [("gather", {"outputs": ROOT_ONLY}), ("scatter", {"inputs": ROOT_ONLY}), ("all_to_all", {"inputs": ROOT_ONLY})],
)
def test_sizes_that_may_differ_are_not_compared(operation: str, root: Mapping[str, Tensors]) -> None:
    recordings = job(*([Planned("0", operation, 4)] for _ in ALL)).recordings()
    bare = {"outputs": Tensors()} if operation == "gather" else {"inputs": Tensors()}
    for rank in ALL:
        changed = replace(recordings[rank].calls[0], **(root if rank == 0 else bare))  # type: ignore[arg-type]
        recordings[rank] = replace(recordings[rank], calls=(changed,))
    assert account_of(recordings).kind is Explanation.NOTHING


def test_a_difference_in_a_group_that_is_not_stuck_is_told_besides() -> None:
    """Group a ran with other sizes on rank 0; what is stuck is the group of all."""
    recordings = job([Planned("a", elements=9), STOP], [Planned("a"), *steps(1)], [*steps(1)], a=(0, 1)).recordings()
    over = {rank: replace(one, calls=tuple(map(ended, one.calls[:1]))) for rank, one in recordings.items()}
    waits = recorded(Planned("0"), 1, 1)
    recordings = {0: over[0], 1: replace(over[1], calls=(*over[1].calls, waits)), 2: recordings[2]}
    one = account_of(recordings)
    assert (one.kind, one.culprits) == (Explanation.NOT_ENTERED, (0,))
    assert [(other.aspect, other.collective.group.name) for other in one.also] == [(Aspect.SIZE, "a")]


def test_groups_of_one_name_with_other_members_are_other_groups() -> None:
    recordings = {
        rank: Recording(
            rank=rank,
            calls=(recorded(Planned("mesh", elements=4 if rank < 2 else 8), 1, 0),),
            members={"mesh": (0, 1) if rank < 2 else (2, 3)},
        )
        for rank in range(4)
    }
    one = account_of(recordings)
    assert one.difference is None
    assert len(one.stuck) == 2


def test_two_backends_of_one_group_count_their_calls_apart() -> None:
    def calls(first: str, second: str) -> tuple[RecordedCall, ...]:
        return tuple(
            ended(recorded(Planned("0", "barrier" if backend == "gloo" else "all_reduce"), 1, place, backend))
            for place, backend in enumerate((first, second))
        )

    recordings = {0: Recording(rank=0, calls=calls("gloo", "nccl")), 1: Recording(rank=1, calls=calls("nccl", "gloo"))}
    assert account_of(recordings).kind is Explanation.NOTHING


def test_of_two_ranks_that_cannot_be_told_the_one_that_is_in_no_call_is_named() -> None:
    """Rings of one call: rank 0 stopped before b, rank 1 is in b, rank 2 waits for both."""
    plans = [[*steps(2), Planned("a"), STOP], [*steps(2), Planned("a"), Planned("b"), *steps(1)], [*steps(3)]]
    one = account_of(job(*plans, a=(0, 1), b=(0, 1)).recordings(kept=1))
    assert (one.kind, one.culprits) == (Explanation.UNCLEAR, (0,))


def test_a_hostile_dump_with_very_many_groups_takes_a_moment() -> None:
    def calls(description: str) -> tuple[RecordedCall, ...]:
        every = (recorded(Planned(f"g{place}"), 1, place) for place in range(1000))
        return tuple(replace(call, description=description) for call in every)

    for description in ("default_pg", "undefined"):
        for ranks in ((0, 131_071), (0, 1)):
            began = time.process_time()
            one = account_of({rank: Recording(rank=rank, calls=calls(description)) for rank in ranks[:1]})
            account_of({rank: Recording(rank=rank, calls=calls(description)) for rank in ranks})
            assert one.stuck
            assert time.process_time() - began < 20.0


def test_nothing_recorded_is_nothing_found() -> None:
    assert account_of({}).kind is Explanation.NOTHING
    assert account_of({0: Recording(rank=0)}).kind is Explanation.NOTHING


def test_a_thousand_ranks_take_a_moment() -> None:
    plan = [*steps(20)]
    recordings = PaperJob({"0": tuple(range(4))}, dict.fromkeys(range(4), plan)).run().recordings()
    half = Recording(rank=0, calls=recordings[0].calls[:-1], members={"0": tuple(range(1000))})
    whole = reopened(replace(half, calls=recordings[0].calls))
    began = time.process_time()
    one = account_of({rank: replace(half if rank % 2 else whole, rank=rank) for rank in range(1000)})
    assert (one.kind, len(one.culprits)) == (Explanation.NOT_ENTERED, 500)
    assert time.process_time() - began < 10.0
