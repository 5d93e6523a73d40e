"""What workers of torch.distributed find in their store was written by one of them, in this run, with the same key."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

from lockstep.training.ranks.listening import reach_store, serve_store
from lockstep.training.sealed_store import SealedStore, StoreForged

KEY, OTHER = b"k" * 32, b"o" * 32
PATIENCE = timedelta(seconds=20)


def sealed(inner: c10d.TCPStore, keys: tuple[bytes, bytes] = (KEY, KEY)) -> list[SealedStore]:
    """The stores of two workers, each with its own connection."""

    def one(rank: int) -> SealedStore:
        client = reach_store("127.0.0.1", inner.port, 2, PATIENCE.total_seconds())
        return SealedStore(client, keys[rank], rank, 2)

    with ThreadPoolExecutor(2) as beside:
        return list(beside.map(one, range(2)))


def new_store() -> c10d.TCPStore:
    """No fixture: pytest would keep it, and its port, for longer than the test."""
    return serve_store("127.0.0.1", 0, 2, PATIENCE.total_seconds())


@pytest.fixture(scope="module", autouse=True)
def _pipes_of_libuv() -> None:
    """The first store of a process makes pipes that last."""
    new_store()


def test_what_one_worker_writes_the_other_reads() -> None:
    inner = new_store()
    one, other = sealed(inner)
    one.set("address", b"127.0.0.1:4000")
    assert other.get("address") == b"127.0.0.1:4000"
    assert b"k" * 32 not in bytes(inner.get("address"))


def test_an_entry_of_somebody_else_is_refused() -> None:
    inner = new_store()
    one, other = sealed(inner)
    one.set("address", b"127.0.0.1:4000")
    one.set("other", b"6.6.6.6:6")
    genuine = bytes(inner.get("other"))
    for forged in (b"6.6.6.6:6", genuine, genuine[:-1] + b"7", b""):
        inner.set("address", forged)  # type: ignore[arg-type]
        with pytest.raises(StoreForged, match="address"):
            other.get("address")


def test_an_entry_of_an_earlier_run_is_refused() -> None:
    inner = new_store()
    one, _ = sealed(inner)
    one.set("address", b"127.0.0.1:4000")
    _, later = sealed(inner)
    with pytest.raises(StoreForged):
        later.get("address")


def test_workers_with_different_keys_do_not_believe_each_other() -> None:
    inner = new_store()
    one, other = sealed(inner, (KEY, OTHER))
    one.set("address", b"127.0.0.1:4000")
    with pytest.raises(StoreForged):
        other.get("address")


def _group(store: c10d.Store, rank: int) -> Any:
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = PATIENCE
    return dist.ProcessGroupGloo(c10d.PrefixStore("gloo", store), rank, 2, options)


def test_gloo_meets_over_it() -> None:
    inner = new_store()
    stores = sealed(inner)
    with ThreadPoolExecutor(2) as beside:
        groups = list(beside.map(_group, stores, range(2)))
        tensors = [torch.full((3,), float(rank)) for rank in (1, 2)]
        works = [group.allreduce([tensor]) for group, tensor in zip(groups, tensors, strict=True)]
        for work in works:
            work.wait()
    assert all(tensor.tolist() == [3.0] * 3 for tensor in tensors)


def test_gloo_is_not_led_to_an_address_of_somebody_else() -> None:
    inner = new_store()
    one, _ = sealed(inner)
    inner.set("gloo/0/1", b"6.6.6.6:6")  # type: ignore[arg-type]
    with pytest.raises(StoreForged):
        _group(one, 0)
