"""Ranks that meet in the store of their launcher: all find each other, or a sentence says why not."""

from __future__ import annotations

import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from lockstep.library.store_meeting import StoreMeeting, _Entry, _placed, meet_in_store
from lockstep.runtime.startup.rendezvous import RendezvousError
from lockstep.training.ranks.listening import serve_store
from lockstep.transports.control.addresses import Address

KEY, OTHER = b"k" * 32, b"o" * 32


def new_store() -> c10d.TCPStore:
    return serve_store("127.0.0.1", 0, 1, 20.0)


@pytest.fixture(scope="module", autouse=True)
def _pipes_of_libuv() -> None:
    """The first store of a process makes pipes that last."""
    new_store()


def meeting(store: c10d.TCPStore, rank: int, world: int, **changed: Any) -> StoreMeeting:
    usual: dict[str, Any] = {"name": "0/0", "timeout": 20.0, "version": "1", "key": KEY}
    return StoreMeeting(rank=rank, world=world, store=Address("127.0.0.1", store.port), **(usual | changed))


def meet_all(meetings: list[StoreMeeting]) -> list[tuple[str, ...] | str]:
    """What each rank learns: the list, or the sentence that it gets instead."""

    def one(spec: StoreMeeting) -> tuple[str, ...] | str:
        try:
            return meet_in_store(spec, 4000 + spec.rank, lambda _: None)
        except RendezvousError as error:
            return str(error)

    with ThreadPoolExecutor(len(meetings)) as beside:
        return list(beside.map(one, meetings))


@pytest.mark.parametrize("key", [KEY, None])
def test_all_ranks_learn_the_same_list(key: bytes | None) -> None:
    store = new_store()
    learned = meet_all([meeting(store, rank, 3, key=key) for rank in range(3)])
    assert learned == [("127.0.0.1:4000", "127.0.0.1:4001", "127.0.0.1:4002")] * 3


def test_a_second_meeting_in_the_same_store_knows_nothing_of_the_first() -> None:
    store = new_store()
    first = meet_all([meeting(store, rank, 2) for rank in range(2)])
    second = meet_all([meeting(store, rank, 2, name="0/1") for rank in range(2)])
    assert first == second


def test_ranks_with_different_keys_do_not_believe_each_other() -> None:
    store = new_store()
    for sentence in meet_all([meeting(store, 0, 2), meeting(store, 1, 2, key=OTHER)]):
        assert "do not have this rank's key: give all ranks the same key file" in sentence


def test_a_rank_that_does_not_come_is_named() -> None:
    store = new_store()
    found = meet_all([meeting(store, rank, 4, timeout=0.5) for rank in (0, 2)])
    for sentence in found:
        assert "ranks 1, 3 of 4 did not come to torchrun's store" in sentence


def test_other_versions_are_named() -> None:
    store = new_store()
    one, other = meet_all([meeting(store, 0, 2), meeting(store, 1, 2, version="2")])
    assert "rank 1 runs Lockstep 2 and rank 0 1; install the same version everywhere" in one
    assert "rank 0 runs Lockstep 1 and rank 1 2" in other


def test_without_a_store_there_is_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nowhere = StoreMeeting(
        rank=0, world=2, store=Address("127.0.0.1", port), name="0/0", timeout=1.0, version="1", key=KEY
    )
    with pytest.raises(RendezvousError, match="rank 0 cannot use torchrun's store"):
        meet_in_store(nowhere, 4000, lambda _: None)


def test_entries_that_are_not_addresses_are_refused() -> None:
    store = new_store()
    store.set("lockstep/0/0/arrived/1", "")
    store.set("lockstep/0/0/rank/1", '{"host": "somewhere", "port": 1, "store": "127.0.0.1", "version": "1"}')
    (sentence,) = meet_all([meeting(store, 0, 2, key=None)])
    assert "holds for rank 1 is not an address" in sentence


def entry(host: str, store: str = "192.0.2.1") -> _Entry:
    return _Entry(ipaddress.ip_address(host), 5000, ipaddress.ip_address(store))


def test_ranks_beside_the_store_are_found_from_other_machines() -> None:
    assert _placed([entry("127.0.0.1", "127.0.0.1"), entry("192.0.2.7")]) == ("192.0.2.1:5000", "192.0.2.7:5000")
    assert _placed([entry("192.0.2.1"), entry("2001:db8::7")]) == ("192.0.2.1:5000", "[2001:db8::7]:5000")
