"""The optimizer's state is on the servers: saving fetches it from there, and loading sends it back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.library.optimizers import KnownOptimizer, is_of_steps
from lockstep.protocol.core.ids import server
from lockstep.protocol.core.plan import Bucket, Plan
from lockstep.runtime.task.worker_node import WorkerNode
from lockstep.training.server.optimizer_state import PieceState, pack, unpack
from lockstep.training.server.shard_store import GET_STATE, PUT_STATE, STATE_CHUNK, STATE_HEADER
from lockstep.training.worker.binding import Bound


class RemoteState:
    """Reads and writes the optimizer state of one job. Blocks until the servers have answered."""

    def __init__(self, node: WorkerNode, plan: Plan, bound: Sequence[Bound]) -> None:
        self._node = node
        self._plan = plan
        self._bound = bound

    def fetch(self, known: KnownOptimizer) -> None:
        """Fill ``optimizer.state`` with what the servers have."""
        parts: dict[int, list[tuple[int, PieceState]]] = {}
        for bucket in self._buckets(known):
            states = unpack(self._get(bucket), len(bucket.pieces))
            for piece, state in zip(bucket.pieces, states, strict=True):
                parts.setdefault(piece.parameter, []).append((piece.first, state))
        known.optimizer.state.clear()
        for index, pieces in parts.items():
            parameter = self._bound[index].trained.parameter
            whole = _join([state for _, state in sorted(pieces, key=lambda part: part[0])], parameter)
            if whole:
                known.optimizer.state[parameter] = whole

    def bring(self, known: KnownOptimizer, *, only_missing: bool = False) -> None:
        """Send the contents of ``optimizer.state`` to the servers. ``only_missing``: of buckets that have none."""
        for bucket in self._buckets(known):
            if only_missing and any(map(is_of_steps, unpack(self._get(bucket), len(bucket.pieces)))):
                continue
            states = [
                _cut(known.optimizer.state.get(self._bound[p.parameter].trained.parameter, {}), p.first, p.elements)
                for p in bucket.pieces
            ]
            self._put(bucket, pack(states))

    def _buckets(self, known: KnownOptimizer) -> list[Bucket]:
        return [bucket for bucket in self._plan.buckets if bucket.group in known.groups]

    def _get(self, bucket: Bucket) -> bytes:
        packed, total = b"", 1
        while len(packed) < total:
            question = STATE_HEADER.pack(bucket.id, len(packed), 0)
            answer = self._node.ask(server(bucket.server), GET_STATE, question)
            _, _, total = STATE_HEADER.unpack_from(answer)
            packed += answer[STATE_HEADER.size :]
        return packed

    def _put(self, bucket: Bucket, packed: bytes) -> None:
        for offset in range(0, len(packed), STATE_CHUNK):
            header = STATE_HEADER.pack(bucket.id, offset, len(packed))
            self._node.ask(server(bucket.server), PUT_STATE, header + packed[offset : offset + STATE_CHUNK])


def _join(pieces: Sequence[PieceState], parameter: Tensor) -> dict[str, Tensor]:
    """One parameter's state, joined from its pieces and in its shape; counters are the same in all pieces."""
    whole: dict[str, Tensor] = {}
    for name, first in pieces[0].items():
        if not first.dim():
            whole[name] = first
            continue
        flat = torch.cat([piece[name].reshape(-1) for piece in pieces])
        whole[name] = flat.view(parameter.shape).to(parameter.device)
    return whole


def _cut(state: dict[str, object], first: int, elements: int) -> PieceState:
    piece: PieceState = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            piece[name] = value.reshape(-1)[first : first + elements].clone() if value.dim() else value.cpu()
        elif isinstance(value, int | float):
            piece[name] = torch.tensor(float(value))
    return piece
