"""A server whose versions are written over the ones before: nobody can come back, and all workers seal first."""

from __future__ import annotations

import pytest

from lockstep.protocol.coordinator.recovery import LossPolicy, RecoveryRules
from lockstep.protocol.core.effects import Apply, SendVersion
from lockstep.protocol.core.events import TensorKind, TransferEnded
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.protocol.core.journal import Journal
from lockstep.protocol.core.messages import Seal
from lockstep.protocol.server.server_machine import ServerMachine
from protocol.protocol_rigs import RATES, ServerRig, only

W0, W1 = worker(0), worker(1)


def ready() -> ServerRig:
    rig = ServerRig(eager=False, overwrites=True)
    rig.initialise()
    rig.say_rates(0)
    return rig


def test_there_is_one_slot_and_the_next_version_goes_into_it() -> None:
    rig = ready()
    assert rig.machine.slots == 1
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    rig.hear(W0, Seal(0, (), ()))
    assert only(rig.hear(W1, Seal(0, (), ())), Apply) == [Apply(0, 0, (W0, W1), (2, 3), 2, RATES, 0, 0)]


def test_an_update_waits_until_nobody_reads_what_it_overwrites() -> None:
    rig = ready()
    assert [one.slot for one in only(rig.pull(0, 0), SendVersion)] == [0]
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    rig.hear(W0, Seal(0, (), ()))
    assert only(rig.hear(W1, Seal(0, (), ())), Apply) == []
    ended = rig.tell(TransferEnded(W0, 0, 0, TensorKind.VERSION, ok=True))
    assert [one.to_slot for one in only(ended, Apply)] == [0]


def test_what_is_or_was_overwritten_is_not_sent() -> None:
    rig = ready()
    rig.arrive(0, 0)
    rig.arrive(1, 0)
    rig.hear(W0, Seal(0, (), ()))
    rig.hear(W1, Seal(0, (), ()))
    assert only(rig.pull(0, 0), SendVersion) == []  # a request that was late
    rig.applied(0)
    assert only(rig.pull(0, 0), SendVersion) == []
    assert [one.version for one in only(rig.pull(1, 1), SendVersion)] == [1]


@pytest.mark.parametrize("fields", [{"eager": True}, {"eager": False, "aggregate": 1}], ids=["eager", "backup workers"])
def test_where_a_worker_may_still_read_it_a_version_is_not_overwritten(fields: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="may still read"):
        ServerMachine(server(0), ClusterShape(1, 2), Journal(), overwrites=True, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "keeps"),
    [
        (RecoveryRules(), False),
        (RecoveryRules(on_worker_loss=LossPolicy.WAIT), True),
        (RecoveryRules(on_worker_loss=LossPolicy.SHRINK), True),
        (RecoveryRules(save_steps=10), True),
        (RecoveryRules(saves_last=True), True),
        (RecoveryRules(returns=True), True),
        (RecoveryRules(server_replicas=1), True),
    ],
)
def test_versions_are_kept_where_anybody_may_ask_for_one_again(rules: RecoveryRules, keeps: bool) -> None:
    assert rules.keeps_versions is keeps
