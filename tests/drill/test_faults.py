"""Faults as data: they travel as text, and the same value strikes in a real cluster and in the simulator."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from lockstep.protocol.core.faults import (
    DropMessage,
    DropTensor,
    EndEarly,
    Fault,
    OddModel,
    OddSetting,
    parse_fault,
    parse_faults,
    to_text,
)
from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.messages import Open, Pull, Ticket

PS0, W1 = str(server(0)), str(worker(1))


@pytest.mark.parametrize("kind", get_args(Fault), ids=lambda kind: kind.__name__)
def test_every_fault_survives_its_printed_form(kind: type[Fault]) -> None:
    needed: dict[str, Any] = {"task": W1, "peer": PS0, "kind": "Pull", "steps": 3}
    fault = kind(**{name: value for name, value in needed.items() if name in kind.__dataclass_fields__})
    assert parse_fault(to_text(fault)) == fault


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "a fault must be a JSON object"),
        ("[]", 'needs a field "fault"'),
        ('{"fault": "Meteor"}', "is one of: DropMessage"),
        ('{"fault": "Freeze"}', "is missing a field"),
        ('{"fault": "Freeze", "task": 3}', "must be of type str"),
        ('{"fault": "Freeze", "task": "x", "step": true}', "must be of type int"),
        ('{"fault": "Freeze", "task": "x", "when": 1}', "has no field 'when'"),
        ("x" * 5000, "at most 4096 characters"),
    ],
)
def test_bad_text_gives_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        parse_fault(text)
    assert "\n" not in str(caught.value)


def test_several_faults_stand_one_a_line() -> None:
    faults: tuple[Fault, ...] = (EndEarly(W1, 3), OddModel(W1))
    assert parse_faults("\n".join(map(to_text, faults)) + "\n\n") == faults
    assert parse_faults("") == ()


def test_a_dropped_message_is_meant_by_kind_peer_and_step() -> None:
    fault = DropMessage(W1, PS0, "Pull", step=5)
    ticket = Ticket("grpc", 1, 1, 0, b"")
    assert fault.hits(server(0), Pull(6, (), ticket)), "the request for version 6 belongs to step 5"
    assert not fault.hits(server(0), Pull(5, (), ticket))
    assert not fault.hits(server(1), Pull(6, (), ticket))
    assert not fault.hits(server(0), Open(6, ()))


def test_a_dropped_tensor_is_meant_by_peer_number_and_bucket() -> None:
    assert DropTensor(W1, PS0, 5).hits(server(0), 5, 9)
    assert not DropTensor(W1, PS0, 5, 1).hits(server(0), 5, 9)
    assert not DropTensor(W1, PS0, 5, 9).hits(server(0), 4, 9)


def test_odd_settings_have_names() -> None:
    assert OddSetting(W1).name == "optimizer"
