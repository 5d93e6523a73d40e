"""Names of tasks and tensors, the shape of a cluster, the journal, and how tables and errors behave."""

from __future__ import annotations

import contextlib
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.protocol.core.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from lockstep.protocol.core.ids import ClusterShape, Role, TaskId, hex64, server, worker
from lockstep.protocol.core.journal import NO_BUCKET, NO_STEP, Happening, Journal
from lockstep.protocol.core.keys import TensorKey, gradient_name, parameter_name
from lockstep.protocol.core.machine import advance
from lockstep.protocol.core.waits import Wait, WaitKind
from lockstep.protocol.phrases import wait_line, waited_for

tasks = st.builds(TaskId, st.sampled_from(Role), st.integers(0, 999_999))
lives = st.integers(0, 2**64 - 1)
names = st.text(st.characters(blacklist_characters=";", codec="utf-8"), max_size=20)
keys = st.builds(TensorKey, tasks, lives, tasks, names)


@given(tasks)
def test_a_task_can_be_read_back_from_its_printed_form(task: TaskId) -> None:
    assert TaskId.parse(str(task)) == task


@given(st.text(max_size=40) | st.from_regex(r"/job:[a-z]+/replica:[0-9]/task:[0-9]{0,8}", fullmatch=True))
def test_whatever_reads_as_a_task_prints_the_same(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert str(TaskId.parse(text)) == text


@pytest.mark.parametrize("text", ["", "worker", "/job:chief/replica:0/task:0", "/job:ps/replica:1/task:0"])
def test_what_is_no_task_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="is not a task name like /job:worker/replica:0/task:0"):
        TaskId.parse(text)


@given(keys)
def test_a_tensor_key_can_be_read_back_from_its_printed_form(key: TensorKey) -> None:
    assert TensorKey.parse(str(key)) == key
    assert key.at_step(7) == f"{key} step 7"
    assert len(str(key).split(";")) == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("a;b", "five parts separated by ';', this one has 2"),
        (f"{worker(0)};{'0' * 16};{server(0)};x;1:0", "ends in 0:0, this one in '1:0'"),
        (f"{worker(0)};abc;{server(0)};x;0:0", "16 hexadecimal digits, not 'abc'"),
        (f"{worker(0)};{'0x' + '0' * 14};{server(0)};x;0:0", "16 hexadecimal digits"),
        (f"{worker(0)};{'A' * 16};{server(0)};x;0:0", "16 hexadecimal digits"),
        (f"worker;{'0' * 16};{server(0)};x;0:0", "'worker' is not a task name"),
    ],
)
def test_what_is_no_tensor_key_is_refused_with_the_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TensorKey.parse(text)


def test_a_key_is_printed_as_people_know_it() -> None:
    key = TensorKey(worker(1), 0xABC, server(0), gradient_name(3))
    assert str(key) == ("/job:worker/replica:0/task:1;0000000000000abc;/job:ps/replica:0/task:0;gradient/bucket_3;0:0")
    assert parameter_name(3) == "parameter/bucket_3"
    assert worker(1).short == "worker 1"
    assert hex64(2**64 - 1) == "f" * 16


def test_a_wait_is_told_with_its_tensor_key_or_in_a_few_words() -> None:
    key = TensorKey(worker(1), 5, server(0), gradient_name(3))
    wait = Wait(server(0), worker(1), WaitKind.GRADIENT, 4, 10.0, 12.0, "asked for", key, 3)
    assert wait_line(wait, 12.5).endswith(f"{key}, step 4 (asked for)")
    for kind in WaitKind:
        assert waited_for(Wait(server(0), worker(1), kind, 4, 0.0, 1.0, ""))


def test_the_coordinator_is_server_0_or_worker_0_where_there_is_no_server() -> None:
    assert ClusterShape(2, 3).coordinator == server(0)
    assert ClusterShape(0, 3).coordinator == worker(0)
    assert ClusterShape(2, 1).tasks() == (server(0), server(1), worker(0))


@given(st.integers(1, 50), st.integers(0, 200))
def test_a_journal_keeps_only_its_last_rows_and_counts_all(capacity: int, rows: int) -> None:
    journal = Journal(capacity)
    for index in range(rows):
        journal.record(float(index), Happening.ARRIVED, index)
    assert len(journal) == min(rows, capacity)
    assert journal.total == rows
    assert [record.step for record in journal] == list(range(max(0, rows - capacity), rows))


def test_a_journal_row_is_named_when_it_is_read() -> None:
    journal = Journal()
    journal.record(1.5, Happening.COMMITTED)
    (record,) = journal
    assert (record.at, record.happening, record.step, record.bucket, record.peer, record.cause) == (
        1.5,
        Happening.COMMITTED,
        NO_STEP,
        NO_BUCKET,
        None,
        "",
    )


def test_a_journal_can_be_read_while_it_is_written() -> None:
    journal = Journal(2)
    journal.record(0.0, Happening.JOINED)
    reading = iter(journal)
    for _ in range(5):
        journal.record(1.0, Happening.VIEW)
    assert [record.happening for record in reading] == [Happening.JOINED]


class _Light(StrEnum):
    RED = "red"
    GREEN = "green"


class _Button(StrEnum):
    PRESS = "press"


def test_a_pair_that_is_not_in_a_table_is_named() -> None:
    table = {(_Light.RED, _Button.PRESS): _Light.GREEN}
    assert advance(table, _Light.RED, _Button.PRESS) is _Light.GREEN
    with pytest.raises(LocalProtocolError, match="no transition from 'green' on 'press'"):
        advance(table, _Light.GREEN, _Button.PRESS)


def test_a_protocol_error_must_say_who_broke_the_rule() -> None:
    with pytest.raises(TypeError, match="the side that broke the rule"):
        ProtocolError("somebody did")
    assert isinstance(LocalProtocolError("we did"), ProtocolError)
    assert isinstance(RemoteProtocolError(worker(1), "they did"), ProtocolError)
