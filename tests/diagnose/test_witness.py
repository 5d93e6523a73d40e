"""Other tasks as witnesses, over real sockets: what they find at the address of one that does not answer."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest

from helpers.ports import free_port
from helpers.snapshots import PS0, W0, W1, healthy, life
from lockstep.diagnose.collect import collect, is_absent, look_at
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.witness import Statement, ask_witnesses, make_statement, read_statement, with_witnesses
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Description
from lockstep.protocol.core.reach import UNREACHABLE, Reach, Silence
from lockstep.transports.control.broadcast import Broadcast
from lockstep.transports.control.monitor_service import add_monitor_service, snapshot_handler, witness_handler
from lockstep.transports.control.server import ControlServer

CLUSTER = healthy()


@contextlib.contextmanager
def task_and_monitor(task: TaskId, fronts: dict[str, str], *, exit_code: int | None = None) -> Iterator[str]:
    """Both behind one address; ``fronts``: where the others are, from this task's point of view."""
    server = ControlServer("127.0.0.1", 0, threads=16)
    snapshot = json.loads(json.dumps(CLUSTER.monitor(task)))
    exited = exit_code is not None
    snapshot["description"].update(task_address=server.address, exited=exited, exit_code=exit_code or 0)
    life_of_task = int(life(task), 16)

    def describe() -> Description:
        return Description(
            str(task), "", 1, 2, life_of_task, "training", 1.0, server.address, exited, exit_code or 0, "1.0", 0xCAFE
        )

    add_monitor_service(server, describe, Broadcast(), lambda: json.dumps(snapshot).encode(), max_watchers=2)
    own = witness_handler(lambda name: make_statement(fronts[name], heard=False))
    shown = snapshot_handler(lambda: json.dumps(CLUSTER.task(task)).encode())
    server.add_handlers("Task", {"Snapshot": shown, "Witness": own})
    server.start()
    try:
        yield server.address
    finally:
        server.stop(0.0)


@contextlib.contextmanager
def mute_host() -> Iterator[str]:
    """What a paused host looks like: its kernel accepts connections, and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_witness_that_reaches_the_task_passes_its_snapshots_on() -> None:
    with (
        task_and_monitor(W1, {}) as suspect,
        task_and_monitor(W0, {str(W1): suspect}) as witness,
    ):
        found = collect({str(W0): witness, str(W1): f"127.0.0.1:{free_port()}"}, 1.0)
        assert found[str(W1)].view is None
        seen = with_witnesses(found, str(PS0))[str(W1)]
    assert seen.words[str(W0)] is Word.HEARS
    assert seen.view is not None
    assert seen.view.task == str(W1)
    assert seen.monitor is not None


def test_on_its_own_host_a_task_where_nothing_listens_is_absent() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert look_at(str(W1), address, 1.0).words == {str(W1): Word.ABSENT}
    assert read_statement(make_statement(address, heard=False)).word() is Word.ABSENT


def test_ended_connections_that_keep_the_port_do_not_count_as_listening() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            listening.accept()[0].close()  # the end that closes first keeps the port for a minute
            assert client.recv(1) == b""
        assert not is_absent(f"127.0.0.1:{port}", Reach.REFUSED), "something listens: the refusal was a firewall's"
    assert is_absent(f"127.0.0.1:{port}", Reach.REFUSED)
    assert not is_absent("192.0.2.1:2222", Reach.REFUSED), "another host"


def test_a_host_that_accepts_and_says_nothing_is_looked_at_twice_and_is_not_unreachable() -> None:
    with mute_host() as suspect, task_and_monitor(W0, {str(W1): suspect}) as witness:
        found = collect({str(W0): witness, str(W1): suspect}, 0.3)
        seen = with_witnesses(found, str(PS0))[str(W1)]
    assert seen.monitor_silence.reach is Reach.MUTE
    assert set(seen.words.values()) == {Word.NONE}


def test_a_monitor_that_answers_the_second_question_only_is_not_missed() -> None:
    with task_and_monitor(W1, {}) as slow:
        late = Silence(Reach.MUTE)
        missed = Seen(task=str(W1), address=slow, silence=late, monitor_silence=late)
        assert with_witnesses({str(W1): missed}, str(PS0))[str(W1)].view is not None


def test_all_witnesses_are_asked_and_those_that_do_not_answer_know_nothing() -> None:
    with (
        task_and_monitor(W1, {}, exit_code=-9) as suspect,
        task_and_monitor(W0, {str(W1): suspect}) as witness,
    ):
        said = ask_witnesses(str(W1), {str(W0): witness, str(PS0): f"127.0.0.1:{free_port()}"})
    assert {task: one.word() for task, one in said.items()} == {str(W0): Word.ENDED, str(PS0): Word.NONE}
    assert said[str(W0)].word(incarnation="0" * 15 + "9") is Word.REPLACED


@pytest.mark.parametrize("reach", list(Reach))
def test_only_what_cannot_be_reached_counts_against_a_task(reach: Reach) -> None:
    assert (Statement(reach=reach).word() is Word.UNREACHABLE) == (reach in UNREACHABLE)
    assert Statement(heard=True, reach=reach).word() is Word.HEARS


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b"\xff", b'{"reach": 3, "heard": "yes", "monitor": [1]}'])
def test_a_statement_that_cannot_be_read_says_nothing(data: bytes) -> None:
    assert read_statement(data).word() is Word.NONE
