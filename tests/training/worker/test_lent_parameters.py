"""Where a worker reads parameters that its servers lend."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from lockstep.protocol.core.messages import ParameterEntry
from lockstep.protocol.core.plan import PAGE, Plan, make_plan
from lockstep.training.tensors import parameter_offsets, parameter_view
from lockstep.training.worker.lent_parameters import LentParameters
from lockstep.transports.loan import HeldLoan

ELEMENTS = 2 * PAGE // 4 + 40
"""Two pages and a bit: three pieces where buckets are pages."""


class Servers:
    """Two servers' slots in shared memory, with the parameters 0, 1, 2, ... in them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.released: list[int] = []
        self.slots = [mmap.mmap(-1, plan.shard_room(server)) for server in range(plan.servers)]
        for bucket in plan.buckets:
            slot = torch.frombuffer(self.slots[bucket.server], dtype=torch.float32)
            for piece in bucket.pieces:
                at = (bucket.shard_offset + piece.offset) // 4
                slot[at : at + piece.elements] = torch.arange(piece.first, piece.first + piece.elements)

    def lend_to(self, lent: LentParameters) -> None:
        for bucket in self._plan.buckets:
            where = slice(bucket.shard_offset, bucket.shard_offset + bucket.nbytes)
            buffer = memoryview(self.slots[bucket.server])[where]
            lent.arrived(bucket.id, HeldLoan(buffer, lambda number=bucket.id: self.released.append(number)))  # type: ignore[misc]


def _made(bucket_bytes: int) -> tuple[Plan, Tensor, list[Tensor]]:
    plan = make_plan(
        [ParameterEntry("small", 8, "float32", 0), ParameterEntry("w", ELEMENTS, "float32", 0)], 2, bucket_bytes
    )
    arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8)
    likes = [torch.empty(8), torch.empty(ELEMENTS)]
    values = [parameter_view(arena, at, like) for at, like in zip(parameter_offsets(plan), likes, strict=True)]
    return plan, arena, values


@pytest.mark.parametrize("layer_by_layer", [False, True], ids=["whole", "by layer"])
@pytest.mark.parametrize("bucket_bytes", [PAGE, PAGE + 64], ids=["pages", "no pages"])
def test_a_parameter_that_is_cut_over_servers_is_read_in_one_piece(bucket_bytes: int, layer_by_layer: bool) -> None:
    plan, arena, values = _made(bucket_bytes)
    assert {bucket.server for bucket in plan.buckets if any(p.parameter == 1 for p in bucket.pieces)} == {0, 1}
    lent, servers = LentParameters(plan, arena), Servers(plan)
    servers.lend_to(lent)
    if layer_by_layer:
        found = [*lent.take([0], values), *lent.take([1], values)]
    else:
        newest = lent.newest(values)
        assert newest is not None
        found = newest
    assert torch.equal(found[0], torch.arange(8).float())
    assert torch.equal(found[1], torch.arange(ELEMENTS).float())
    copied = bool(values[1].count_nonzero())
    assert copied is (bucket_bytes != PAGE), "whole pages are mapped, others are copied together"
    lent.release_former()
    assert not servers.released


def test_loans_of_the_former_version_are_released_when_all_of_the_next_is_in_use() -> None:
    plan, arena, values = _made(PAGE)
    lent, first, second = LentParameters(plan, arena), Servers(plan), Servers(plan)
    first.lend_to(lent)
    lent.newest(values)
    lent.release_former()
    second.lend_to(lent)
    lent.take([0], values)
    assert not first.released, "the other parameter is still read there"
    lent.newest(values)
    lent.release_former()
    assert sorted(first.released) == [bucket.id for bucket in plan.buckets]
    lent.close()
    assert sorted(second.released) == [bucket.id for bucket in plan.buckets]
