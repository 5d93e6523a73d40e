"""What the library adds to a step: parameters without a gradient, void steps, values, occasions, and questions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.protocol.core.effects import Answered, Apply, GiveBack, Send, Serve
from lockstep.protocol.core.events import Asked, LinkLost, LinkUp, Prepared, Tick
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.messages import Answer, Failed, Question, Seal, Setting
from lockstep.protocol.core.plan import first_untrained_difference
from lockstep.protocol.core.timing import QUESTION_SECONDS
from lockstep.protocol.phrases import waited_for
from protocol.protocol_rigs import ServerRig, WorkerRig, layout_of, life, messages_to, only

S0, W0, W1 = server(0), worker(0), worker(1)


def sealed(first: Seal, second: Seal) -> ServerRig:
    """A server whose two workers have sent everything and sealed the step this way; the last seal is still to come."""
    rig = ServerRig(eager=False)
    rig.initialise()
    rig.say_rates(0)
    for index, seal in enumerate((first, second)):
        if 0 not in seal.absent:
            rig.arrive(index, 0)
    rig.hear(W0, first)
    return rig


def apply_of(first: Seal, second: Seal) -> tuple[Apply, list[GiveBack]]:
    effects = sealed(first, second).hear(W1, second)
    (apply,) = only(effects, Apply)
    return apply, only(effects, GiveBack)


PLAIN = Seal(0, (), ())


def test_a_parameter_without_a_gradient_anywhere_is_left_alone() -> None:
    apply, _ = apply_of(replace(PLAIN, without=(0, 2)), replace(PLAIN, without=(2, 5)))
    assert apply.without == (2,)
    assert apply.contributors == (W0, W1)


def test_a_parameter_that_is_missing_with_its_whole_bucket_counts_as_missing_there() -> None:
    apply, _ = apply_of(replace(PLAIN, without=(0,)), replace(PLAIN, absent=(0,)))
    assert (apply.without, apply.contributors, apply.replicas) == ((0,), (W0,), 2)


def test_a_void_seal_of_one_worker_voids_the_step_for_all() -> None:
    apply, given_back = apply_of(PLAIN, replace(PLAIN, void=True))
    assert (apply.contributors, apply.arrivals) == ((), ())
    assert len(given_back) == 2


def test_values_are_taken_as_they_are_and_from_the_chief_alone() -> None:
    apply, _ = apply_of(replace(PLAIN, values=True), replace(PLAIN, values=True, absent=(0,)))
    assert (apply.values, apply.contributors, apply.replicas) == (True, (W0,), 1)


def test_gradients_are_added_up_where_that_was_asked_for() -> None:
    rig = sealed(PLAIN, PLAIN)
    rig.machine.summed = True
    (apply,) = only(rig.hear(W1, PLAIN), Apply)
    assert apply.replicas == 1


def test_workers_that_came_by_different_calls_are_named() -> None:
    rig = sealed(replace(PLAIN, occasion="step() of optimizer 0"), PLAIN)
    effects = rig.hear(W1, replace(PLAIN, occasion="step() of optimizer 1"))
    (failed,) = messages_to(effects, S0, Failed)
    assert failed.culprit == str(W1)
    assert "reached step 0 with step() of optimizer 1, but worker 0 with step() of optimizer 0" in failed.reason.text


def test_a_worker_whose_untrained_tensors_differ_is_named() -> None:
    rig = ServerRig()
    layout = layout_of(rig.plan)
    rig.hear(W0, replace(layout, untrained=(Setting("buffer 'mean'", "aa"),)))
    rig.hear(W1, replace(layout, untrained=(Setting("buffer 'mean'", "bb"),)))
    (failed,) = messages_to(rig.tell(Prepared(rig.plan)), S0, Failed)
    assert failed.culprit == str(W1)
    assert "buffer 'mean', which is not trained, has different values" in failed.reason.text


@pytest.mark.parametrize(
    ("chiefs", "others", "words"),
    [
        (("a=1", "b=2"), ("a=1", "b=2"), None),
        (("a=1", "b=2"), ("a=1", "b=3"), "b, which is not trained, has different values"),
        (("a=1", "b=2"), ("b=2",), "only the chief has a"),
        (("a=1",), ("a=1", "c=2"), "the chief does not have c"),
    ],
)
def test_first_difference_of_what_is_not_trained(
    chiefs: tuple[str, ...], others: tuple[str, ...], words: str | None
) -> None:
    def settings(texts: tuple[str, ...]) -> list[Setting]:
        return [Setting(*text.split("=")) for text in texts]

    found = first_untrained_difference(settings(chiefs), settings(others))
    assert found is None if words is None else words in str(found)


# -- questions outside of the steps --

QUESTION = Question(7, "the optimizer's state", b"bucket 3")


def test_a_server_lets_its_store_answer() -> None:
    rig = ServerRig()
    assert rig.hear(W1, QUESTION) == [Serve(W1, QUESTION)]
    assert rig.hear(W1, QUESTION, incarnation=1) == []


def test_a_question_is_repeated_until_it_is_answered_once() -> None:
    rig = WorkerRig()
    assert rig.tell(Asked(QUESTION)) == [Send(S0, QUESTION)]
    waits = [wait for wait in rig.machine.waits() if waited_for(wait) == QUESTION.what]
    assert [wait.on for wait in waits] == [S0]
    rig.now += QUESTION_SECONDS
    assert messages_to(rig.tell(Tick()), S0, Question) == [QUESTION]
    answer = Answer(7, b"state", "")
    assert rig.hear(S0, answer) == [Answered(S0, answer)]
    assert rig.hear(S0, answer) == []
    rig.now += QUESTION_SECONDS
    assert messages_to(rig.tell(Tick()), S0, Question) == []
    assert QUESTION.what not in [waited_for(wait) for wait in rig.machine.waits()]


def test_a_question_is_asked_again_on_a_new_link() -> None:
    rig = WorkerRig()
    rig.tell(Asked(QUESTION))
    rig.tell(LinkLost(S0, "reset"))
    assert messages_to(rig.tell(LinkUp(S0, life(S0))), S0, Question) == [QUESTION]


def test_an_answer_of_another_server_does_not_count() -> None:
    rig = WorkerRig(servers=2, buckets=2)
    rig.tell(Asked(QUESTION))
    assert rig.hear(server(1), Answer(7, b"", "")) == []
