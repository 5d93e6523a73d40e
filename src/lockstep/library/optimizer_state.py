"""The optimizer's state is on the servers: saving fetches it from there, and loading sends it back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.library.optimizers import KnownOptimizer, is_of_steps
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
        return self._of_one_home(bucket, lambda: self._get_parts(bucket))

    def _get_parts(self, bucket: Bucket) -> bytes:
        packed, total = b"", 1
        while len(packed) < total:
            question = STATE_HEADER.pack(bucket.id, len(packed), 0)
            answer = self._node.ask(GET_STATE, question, bucket.id)
            _, _, total = STATE_HEADER.unpack_from(answer)
            packed += answer[STATE_HEADER.size :]
        return packed

    def _put(self, bucket: Bucket, packed: bytes) -> None:
        self._of_one_home(bucket, lambda: self._put_parts(bucket, packed))

    def _put_parts(self, bucket: Bucket, packed: bytes) -> bytes:
        for offset in range(0, len(packed), STATE_CHUNK):
            part = packed[offset : offset + STATE_CHUNK]
            question = STATE_HEADER.pack(bucket.id, offset, len(packed)) + part
            self._node.ask(PUT_STATE, question, bucket.id, changes=offset + len(part) == len(packed))
        return b""

    def _of_one_home(self, bucket: Bucket, ask: Callable[[], bytes]) -> bytes:
        """What one server has answered from the first part to the last. If another one has taken its place meanwhile,
        that one is asked for all of it: it has the same, but not the parts."""
        while True:
            home = self._node.home_of(bucket.id)
            try:
                answer = ask()
            except ValueError:
                if self._node.home_of(bucket.id) == home:
                    raise
                continue
            if self._node.home_of(bucket.id) == home:
                return answer


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
