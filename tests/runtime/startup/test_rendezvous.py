"""Processes that know only their rank and where rank 0 is find each other, or report which is missing."""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
import time
from dataclasses import replace

import pytest

from helpers.ports import free_port
from helpers.waiting import wait_until
from lockstep.runtime.startup import rendezvous
from lockstep.runtime.startup.rendezvous import RendezvousError, RendezvousSpec, meet, own_addresses
from lockstep.transports.control.addresses import Address, IPAddress

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def meeting(rank: int, world: int, port: int, **changes: object) -> RendezvousSpec:
    whole = RendezvousSpec(
        rank=rank, world=world, address=Address("127.0.0.1", port), timeout=10.0, version="1", key=KEY
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def meet_all(meetings: list[RendezvousSpec], other_port: int = -1) -> list[tuple[str, ...] | str]:
    """What each receives: the list, or the sentence of its error. ``other_port``: who has not the port of its rank."""
    results: list[tuple[str, ...] | str] = [""] * len(meetings)

    def one(index: int) -> None:
        try:
            results[index] = meet(
                meetings[index], 4000 + meetings[index].rank + 100 * (index == other_port), lambda _: None
            )
        except RendezvousError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(meetings))]
    for thread in reversed(threads):  # rank 0 starts last: the order does not matter
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


@pytest.mark.parametrize("world", [1, 2, 5])
def test_every_rank_receives_the_whole_list(world: int) -> None:
    port = free_port()
    assert meet_all([meeting(rank, world, port) for rank in range(world)]) == [tuple_of(world)] * world


def test_a_missing_rank_is_named_by_rank_0() -> None:
    port = free_port()
    first, second = meet_all([meeting(rank, 4, port, timeout=0.5) for rank in (0, 2)])
    assert "ranks 1, 3 of 4 did not connect to 127.0.0.1" in first
    assert "ended before all ranks had connected" in second


def test_rank_0_that_is_missing_is_named_by_the_others() -> None:
    (sentence,) = meet_all([meeting(1, 2, free_port(), timeout=0.3)])
    assert "rank 1 could not reach rank 0 at 127.0.0.1" in sentence


def test_two_processes_with_one_rank() -> None:
    port = free_port()
    results = meet_all([meeting(0, 3, port, timeout=1.0), meeting(1, 3, port), meeting(1, 3, port)], other_port=2)
    assert any("two processes have rank 1" in str(result) for result in results)
    assert "ranks 2 of 3 did not connect" in results[0]


@pytest.mark.slow
def test_the_next_life_of_a_rank_that_was_lost_while_all_meet_takes_its_place() -> None:
    port = free_port()
    met: dict[str, tuple[str, ...]] = {}
    host = rendezvous._Host(meeting(0, 3, port), 4000, lambda _: None)
    gathering = threading.Thread(target=lambda: met.update(all=host.gather()))
    gathering.start()
    lost = rendezvous._reach(meeting(1, 3, port), time.monotonic() + 10, lambda _: None)
    lost.send(json.dumps({"rank": 1, "world": 3, "port": 4001, "host": "127.0.0.1"}).encode(), time.monotonic() + 10)
    wait_until(lambda: 1 in host._guests, 10, "the rank is in the list")
    former = host._guests[1]
    lost.close()
    again = threading.Thread(target=lambda: met.update(again=meet(meeting(1, 3, port), 4001, lambda _: None)))
    again.start()
    wait_until(lambda: host._guests.get(1, former) is not former, 10, "its place is taken")
    assert meet(meeting(2, 3, port), 4002, lambda _: None) == tuple_of(3)
    for thread in (gathering, again):
        thread.join(20)
    assert met == {"all": tuple_of(3), "again": tuple_of(3)}


def tuple_of(world: int) -> tuple[str, ...]:
    return tuple(f"127.0.0.1:{4000 + rank}" for rank in range(world))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"key": OTHER_KEY}, "does not know this job's key; give every task of the job the same key"),
        ({"key": None}, "the other end wants a key, this end runs without one"),
        ({"version": "2"}, "the other end runs another version of Lockstep"),
        ({"world": 3}, r"rank 0 has a different world \(3, not 2\)"),
    ],
)
def test_a_process_of_another_job_is_refused(changes: dict[str, object], sentence: str) -> None:
    port = free_port()
    refusals: list[str] = []

    def stranger() -> None:
        try:
            meet(replace(meeting(1, 2, port), **changes), 1, lambda _: None)  # type: ignore[arg-type]
        except RendezvousError as error:
            refusals.append(str(error))
        right.start()

    def rightful() -> None:
        hosts.append(meet(meeting(1, 2, port), 4001, lambda _: None))

    hosts: list[tuple[str, ...]] = []
    wrong, right = threading.Thread(target=stranger), threading.Thread(target=rightful)
    wrong.start()
    assert meet(meeting(0, 2, port), 4000, lambda _: None) == ("127.0.0.1:4000", "127.0.0.1:4001")
    wrong.join(10)
    right.join(10)
    assert hosts == [("127.0.0.1:4000", "127.0.0.1:4001")]
    with pytest.raises(RendezvousError, match=sentence):
        raise RendezvousError(refusals[0])


def test_strangers_that_speak_something_else_do_no_harm() -> None:
    port = free_port()

    def stranger() -> None:
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n\n", b"[1]\n", b"{}\n"):
            while True:
                try:
                    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except OSError:
                    continue
            with connection:
                connection.sendall(nonsense)
                connection.recv(100)
        guest.start()

    guest = threading.Thread(target=lambda: meet(meeting(1, 2, port), 4001, lambda _: None))
    noise = threading.Thread(target=stranger)
    noise.start()
    assert len(meet(meeting(0, 2, port), 4000, lambda _: None)) == 2
    noise.join(10)
    guest.join(10)


def test_a_port_that_is_taken_gets_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousError, match=r"rank 0 cannot listen at 127\.0\.0\.1.*choose another port"):
            meet(meeting(0, 2, port), 4000, lambda _: None)


OWN, OTHER, LOOPBACK = (ipaddress.ip_address(text) for text in ("10.0.0.1", "10.9.9.9", "127.0.1.1"))


@pytest.mark.parametrize(
    ("resolved", "listens"),
    [
        ((OWN,), ["10.0.0.1"]),
        ((LOOPBACK, OWN), ["127.0.1.1", "10.0.0.1"]),
        ((LOOPBACK,), ["127.0.1.1", "10.0.0.5"]),
        ((OTHER,), ["10.0.0.5"]),
    ],
    ids=["its own", "both", "a machine that takes itself for loopback", "a service in front"],
)
def test_rank_0_listens_where_the_others_look_for_it_and_not_on_every_interface(
    resolved: tuple[IPAddress, ...], listens: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "resolve", lambda _: resolved)
    monkeypatch.setattr(rendezvous, "interface_addresses", lambda: frozenset({OWN}))
    monkeypatch.setattr(rendezvous, "main_address", lambda: "10.0.0.5")
    assert own_addresses(meeting(0, 2, 1, address=Address("node1", 1))) == listens


def test_rank_0_listens_where_bind_says() -> None:
    assert own_addresses(meeting(0, 2, 1, address=Address("203.0.113.7", 1), bind="127.0.0.2")) == ["127.0.0.2"]
