"""What a program may ask for about checkpoints and losses, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from lockstep.library.errors import UsageError
from lockstep.library.settings import (
    OWN,
    TORCH,
    Exchange,
    Keeping,
    keeping_problems,
    loss_notice,
    recovery_rules,
    replica_problems,
)
from lockstep.library.state_codec import from_text, to_text
from lockstep.protocol.coordinator.recovery import LossPolicy

PLAIN = Exchange()
ASYNC = Exchange(synchronous=False)
BACKUP = Exchange(replicas_to_aggregate=1)


@pytest.mark.parametrize(
    ("exchange", "launched", "policy", "why"),
    [
        (PLAIN, False, LossPolicy.WAIT, ""),
        (PLAIN, True, LossPolicy.ABORT, "unless it starts 'lockstep run"),
        (ASYNC, False, LossPolicy.ABORT, "no common step"),
        (BACKUP, False, LossPolicy.ABORT, "completed without this worker"),
    ],
    ids=["host lists", "a launcher", "async", "backup workers"],
)
def test_a_lost_worker_is_waited_for_where_it_can_come_back_and_else_the_start_says_why_not(
    exchange: Exchange, launched: bool, policy: LossPolicy, why: str
) -> None:
    rules = recovery_rules(Keeping(), exchange, 2, 30.0, launched=launched)
    assert rules.on_worker_loss is policy
    notice = loss_notice(rules, exchange, 2, launched=launched)
    assert bool(notice) == bool(why)
    assert why in notice
    asked = list(keeping_problems(Keeping(on_worker_loss="wait"), exchange, 2, launched=launched))
    assert bool(asked) == bool(why)


@pytest.mark.parametrize(
    ("keeping", "goes_back", "returns"),
    [
        (Keeping(), True, False),
        (Keeping(train_dir="/tmp/x"), False, False),
        (Keeping(train_dir="/tmp/x"), True, True),
        (Keeping(train_dir="/tmp/x", on_worker_loss="abort"), True, False),
    ],
)
def test_a_job_goes_back_to_its_checkpoint_where_all_are_started_again(
    keeping: Keeping, goes_back: bool, returns: bool
) -> None:
    rules = recovery_rules(keeping, PLAIN, 2, 30.0, launched=False, servers=0, goes_back=goes_back)
    assert (rules.returns, rules.on_worker_loss) == (returns, LossPolicy.ABORT)
    assert bool(loss_notice(rules, PLAIN, 2, launched=False, servers=0)) is not returns


@pytest.mark.parametrize(
    ("keeping", "launched", "carrier", "said"),
    [
        (
            Keeping(train_dir="/tmp/x"),
            True,
            OWN,
            "a launcher ends every rank.*lockstep run.*--max-restarts.*it resumes",
        ),
        (Keeping(), True, OWN, "a launcher ends every rank when one dies.*begins at step 0: there is no train_dir"),
        (Keeping(), True, TORCH, "a launcher ends every rank when one dies"),
        (Keeping(), False, OWN, r"comes back only below 'lockstep run', which starts it again \("),
        (Keeping(), False, TORCH, r"neither takes a lost rank back into its group \("),
    ],
)
def test_without_servers_the_start_says_what_a_loss_does(
    keeping: Keeping, launched: bool, carrier: str, said: str
) -> None:
    rules = recovery_rules(keeping, PLAIN, 2, 30.0, launched=launched, servers=0)
    assert re.search(said, loss_notice(rules, PLAIN, 2, launched=launched, servers=0, carrier=carrier))


def test_who_asks_for_an_end_gets_it_and_is_told() -> None:
    rules = recovery_rules(Keeping(on_worker_loss="abort"), PLAIN, 2, 30.0, launched=False)
    assert rules.on_worker_loss is LossPolicy.ABORT
    assert "on_worker_loss is abort" in loss_notice(rules, PLAIN, 2, launched=False)


@pytest.mark.parametrize(
    ("keeping", "exchange", "sentence"),
    [
        (Keeping(on_worker_loss="shrink"), PLAIN, "use one of: wait, abort"),
        (Keeping(train_dir="/tmp/x"), ASYNC, "cannot be used: asynchronous training has no common step"),
        (Keeping(train_dir="/tmp/x"), BACKUP, "cannot be used: with backup workers"),
        (Keeping(save_model_steps=5), PLAIN, "add train_dir"),
        (Keeping(from_scratch=True), PLAIN, "from_scratch sets aside what train_dir holds"),
        (Keeping(train_dir="/tmp/x", save_model_steps=5, save_model_secs=5), PLAIN, "choose one"),
        (Keeping(train_dir="/tmp/x", max_ckpts_to_keep=-1), PLAIN, "must not be negative"),
    ],
)
def test_choices_that_make_no_sense_get_a_sentence(keeping: Keeping, exchange: Exchange, sentence: str) -> None:
    (problem,) = keeping_problems(keeping, exchange, 2, launched=False)
    assert sentence in problem


@pytest.mark.parametrize(
    ("exchange", "sentence"),
    [
        (ASYNC, r"omit synchronous=False \(the flag --cross_replica_sync=False\)\."),
        (BACKUP, "needs all workers in every step; omit replicas_to_aggregate"),
    ],
    ids=["async", "backup workers"],
)
def test_second_homes_need_steps_of_all_workers(exchange: Exchange, sentence: str) -> None:
    (problem,) = replica_problems(exchange, 2)
    assert re.search(sentence, problem)


def test_a_job_under_a_launcher_may_save_checkpoints() -> None:
    assert list(keeping_problems(Keeping(train_dir="/tmp/x"), PLAIN, 2, launched=True)) == []


def test_what_objects_know_survives_as_text_and_tensors() -> None:
    state: dict[Any, Any] = {
        "last_epoch": 3,
        "rates": [0.1, 1e-300, float("inf")],
        "milestones": Counter({4: 1, 8: 2}),
        7: ("a", None, True),
        "scale": torch.tensor([1.5, 2.5]),
        "nested": {"tuple": [1]},
    }
    tensors: dict[str, torch.Tensor] = {}
    back = from_text(to_text(state, tensors), tensors)
    assert torch.equal(back.pop("scale"), state.pop("scale"))
    assert back == state
    assert isinstance(back["milestones"], Counter)


def test_what_cannot_be_told_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="it found set, which"):
        to_text({"seen": {1, 2}}, {})
