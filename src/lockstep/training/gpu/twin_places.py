"""Where the tables of events and twins are, behind the tensors of a region. Both ends know it from the plan."""

from __future__ import annotations

from lockstep.protocol.core.plan import Plan
from lockstep.training.gpu.gpu_twins import TWIN_BYTES
from lockstep.training.gpu.shared_events import spare_bytes, table_at


def twin_at(nbytes: int, plan: Plan) -> int:
    """Where the table of a twin is, behind this many bytes of tensors and the table of events."""
    return table_at(nbytes + spare_bytes(len(plan.buckets)))


def room_for_tables(plan: Plan) -> int:
    """For both tables, behind the tensors of a region of any size."""
    return twin_at(0, plan) + table_at(1) + TWIN_BYTES
