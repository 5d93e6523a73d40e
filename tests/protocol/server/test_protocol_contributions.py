"""What makes a step on the synchronous server: sealed editions, absent gradients, and the workers that were named."""

from __future__ import annotations

import pytest

from lockstep.protocol.core.effects import Apply, Effect, GiveBack
from lockstep.protocol.core.events import Tick
from lockstep.protocol.core.ids import INITIAL_STEP, server, worker
from lockstep.protocol.core.messages import Applied, Contributors, Edition, Seal
from lockstep.protocol.core.timing import REPEAT_SECONDS
from lockstep.protocol.server.ledger import ServedBucketState
from protocol.protocol_rigs import ServerRig, messages_to, only
from protocol.server.ready_server import ready

W0, W1 = worker(0), worker(1)


# -- seals, editions, absent gradients --


def sealed_up_to(rig: ServerRig, index: int, *editions: Edition, absent: tuple[int, ...] = ()) -> list[Effect]:
    return rig.hear(worker(index), Seal(rig.machine.step, absent, editions))


def test_a_sealing_server_applies_after_every_seal() -> None:
    rig = ready(eager=False)
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    assert sealed_up_to(rig, 0) == []
    assert len(only(sealed_up_to(rig, 1), Apply)) == 1


def test_a_sealing_server_applies_the_sealed_edition_and_gives_the_former_back() -> None:
    rig = ready(workers=1, eager=False)
    rig.arrive(0, 0, edition=0)
    assert rig.arrive(0, 0, edition=1) == [GiveBack(2)]
    (apply,) = only(sealed_up_to(rig, 0, Edition(0, 1)), Apply)
    assert apply.arrivals == (3,)


def test_an_edition_that_was_replaced_goes_back_when_the_seal_says_so() -> None:
    """The worker lends its memory in place: it can send the final edition only once the former one is given back."""
    rig = ready(workers=1, eager=False)
    rig.arrive(0, 0, edition=0)
    assert rig.state() == ServedBucketState.COMPLETE.value
    assert sealed_up_to(rig, 0, Edition(0, 1)) == [GiveBack(2)]
    assert rig.state() == ServedBucketState.COLLECTING.value
    assert len(only(rig.arrive(0, 0, edition=1), Apply)) == 1


def test_an_edition_that_was_replaced_goes_back_when_it_comes_after_the_seal() -> None:
    rig = ready(workers=1, eager=False)
    sealed_up_to(rig, 0, Edition(0, 2))
    assert rig.arrive(0, 0, edition=1) == [GiveBack(2)]
    assert rig.drops() == ["edition 1; edition 2 was sealed"]
    assert len(only(rig.arrive(0, 0, edition=2), Apply)) == 1


def test_an_older_edition_that_comes_late_is_a_duplicate() -> None:
    rig = ready(workers=1, eager=False)
    rig.arrive(0, 0, edition=1)
    assert rig.arrive(0, 0, edition=0) == [GiveBack(3)]
    assert rig.drops() == ["a duplicate"]


@pytest.mark.parametrize("eager", [True, False])
def test_an_absent_gradient_counts_and_is_not_reduced(eager: bool) -> None:
    rig = ready(eager=eager)
    rig.arrive(0, 0)
    effects = sealed_up_to(rig, 1, absent=(0,))
    if not eager:
        effects += sealed_up_to(rig, 0)
    (apply,) = only(effects, Apply)
    assert (apply.contributors, apply.replicas) == ((W0,), 2)


def test_a_gradient_that_was_taken_back_is_given_back_and_refused_later() -> None:
    rig = ready(eager=False)
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    sealed_up_to(rig, 0)
    effects = sealed_up_to(rig, 1, absent=(0,))
    assert only(effects, GiveBack) == [GiveBack(3)]
    assert [apply.contributors for apply in only(effects, Apply)] == [(W0,)]


def test_a_seal_counts_once_and_only_for_the_open_step() -> None:
    rig = ready(workers=1, eager=False)
    assert rig.hear(W0, Seal(1, (), ())) == []
    rig.hear(W0, Seal(0, (), ()))
    assert rig.hear(W0, Seal(0, (), ())) == []
    assert len(only(rig.arrive(0, 0), Apply)) == 1


# -- backup workers --


def backed_up(*, workers: int = 3, aggregate: int = 2) -> ServerRig:
    rig = ServerRig(workers=workers, eager=False, aggregate=aggregate)
    rig.initialise()
    rig.say_rates(0)
    return rig


def decide(rig: ServerRig, step: int, *indices: int) -> list[Effect]:
    return rig.hear(server(0), Contributors(step, indices))


def test_a_step_is_made_of_those_that_the_coordinator_names() -> None:
    rig = backed_up()
    for index in (0, 1, 2):
        rig.arrive(index, 0)
        sealed_up_to(rig, index)
    effects = decide(rig, 0, 0, 2)
    (apply,) = only(effects, Apply)
    assert (apply.contributors, apply.replicas) == ((W0, worker(2)), 2)
    assert only(effects, GiveBack) == [GiveBack(3)]
    assert rig.drops() == ["does not contribute to this step"]


def test_nothing_is_applied_before_it_is_decided_who_makes_the_step() -> None:
    rig = backed_up()
    for index in (0, 1, 2):
        rig.arrive(index, 0)
        assert sealed_up_to(rig, index) == []
    rig.now += REPEAT_SECONDS
    assert messages_to(rig.tell(Tick()), server(0), Applied) == [Applied(INITIAL_STEP)], "the decision may be lost"


def test_the_seal_of_a_worker_that_does_not_contribute_counts_for_nothing() -> None:
    rig = backed_up()
    decide(rig, 0, 0, 2)
    assert sealed_up_to(rig, 1, absent=(0,)) == []
    assert rig.arrive(1, 0) == [GiveBack(2)]


def test_a_decision_is_taken_once_and_from_the_coordinator_only() -> None:
    rig = backed_up()
    assert rig.hear(W0, Contributors(0, (0, 1))) == []
    decide(rig, 0, 0, 2)
    decide(rig, 0, 0, 1)
    assert rig.machine.contributing.of(0) == (W0, worker(2))
