"""Parameters that a worker reads directly in its servers' two slots, which are mapped here.

A version is in one slot of each server, the next one in the other, so the model alternates between two sets of views.
A parameter that is split over several servers is not contiguous in any slot: its pieces are mapped side by side, or
copied together if they are not whole pages. The memory is shared read-only; writing to such a parameter would end the
process.

The next version is taken as a whole (``newest``), or parameter by parameter while the rest is still in transit
(``take``, and ``newest`` for what is left). In both cases ``release_former`` completes the change.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.protocol.core.ids import BucketId
from lockstep.protocol.core.plan import ELEMENT_BYTES, Bucket, Plan
from lockstep.training.tensors import as_tensor, dtype_name, parameter_offsets, parameter_view
from lockstep.training.torch_private import foreach_copy_
from lockstep.transports.base import Loan
from lockstep.transports.joined_memory import join_pages

_VIEWS_OF_A_PARAMETER = 4
"""One for each of two slots; more belong to slots that were mapped before a link was reopened."""


_Slots = tuple[object, ...]
"""The mappings in which something was found, as a key to find it again. They are kept with it: otherwise a new mapping
could get the id of one that is gone."""


@dataclass(slots=True)
class _Places:
    """Where the values of one version are: by parameter, and what must be copied together first."""

    values: list[Tensor]
    targets: list[Tensor]
    sources: list[Tensor]
    slots: _Slots


class LentParameters:
    """The loans of the versions that a worker uses now and next."""

    def __init__(self, plan: Plan, arena: Tensor) -> None:
        """``arena``: where buckets that are not lent arrive, and where pieces are assembled."""
        self._plan = plan
        self._arena = arena
        self._lock = threading.Lock()
        self._fresh: dict[BucketId, Loan] = {}
        self._held: dict[BucketId, Loan] = {}
        self._former: list[Loan] = []
        self._taken: set[BucketId] = set()
        """Buckets whose next version was already taken, while others are still in transit."""
        self._homes = _homes(plan)
        self._views: dict[tuple[int, ...], tuple[Tensor | None, _Slots]] = {}
        """By parameter and the slots of its pieces: where it can be read, or None if it must be copied."""
        self._places: dict[tuple[int, ...], _Places] = {}

    def arrived(self, bucket: BucketId, loan: Loan) -> None:
        """Loop's thread: the next version of a bucket can be read in this loan."""
        with self._lock:
            former = self._fresh.pop(bucket, None)
            self._fresh[bucket] = loan
        if former is not None:
            former.release()

    def newest(self, likes: Sequence[Tensor]) -> list[Tensor] | None:
        """Training thread: where the values of all parameters are now; None if all are in the arena."""
        if self._taken:
            return self.take(range(len(likes)), likes)
        with self._lock:
            fresh, self._fresh = self._fresh, {}
        former, self._held = self._held, fresh
        self._former += former.values()
        if not fresh:
            return None
        whole = len(fresh) == len(self._plan.buckets)
        # A slot is one mapping: the mappings in use determine which views are right.
        slots = _slots_of(loan for _, loan in sorted(fresh.items()))
        key = tuple(map(id, slots)) if whole else ()
        places = self._places.get(key)
        if places is None:
            places = self._find_places(fresh, likes, slots)
            if len(self._places) >= 2:
                self._places.clear()  # a link was reopened, and maps the slots again
            if whole:
                self._places[key] = places
        if places.targets:
            with torch.no_grad():
                foreach_copy_(places.targets, places.sources)
        return places.values

    def take(self, parameters: Iterable[int], likes: Sequence[Tensor]) -> list[Tensor]:
        """Training thread: where the next values of these parameters are; all their buckets have arrived."""
        wanted = list(parameters)
        buckets = {bucket.id for index in wanted for bucket, _, _ in self._homes[index]} - self._taken
        self._taken |= buckets
        with self._lock:
            for bucket in buckets:
                if (held := self._held.pop(bucket, None)) is not None:
                    self._former.append(held)
                if (fresh := self._fresh.pop(bucket, None)) is not None:
                    self._held[bucket] = fresh
        return [self._value(index, likes[index]) for index in wanted]

    def _value(self, index: int, like: Tensor) -> Tensor:
        home = self._homes[index]
        loans = {bucket.id: self._held[bucket.id] for bucket, _, _ in home if bucket.id in self._held}
        if not loans:
            return like
        slots = _slots_of(loans.values())
        key = (index, *map(id, slots))
        if key not in self._views:
            if len(self._views) > _VIEWS_OF_A_PARAMETER * len(self._homes):
                self._views.clear()
            view = self._view_in_place(home, loans, _bytes_of(loans), like)
            self._views[key] = (_joined(home, _bytes_of(loans), like) if view is None else view), slots
        view = self._views[key][0]
        if view is not None:
            return view
        places = _Places([], [], [], slots)
        self._put_together(places, home, _bytes_of(loans))
        with torch.no_grad():
            foreach_copy_(places.targets, places.sources)
        return like

    def release_former(self) -> None:
        """Training thread: nothing uses the previous version any more; its servers may overwrite it."""
        former, self._former = self._former, []
        self._taken.clear()
        for loan in former:
            loan.release()

    def close(self) -> None:
        """Return everything. The parameters must be elsewhere by now."""
        with self._lock:
            loans = [*self._fresh.values(), *self._held.values(), *self._former]
            self._fresh, self._held, self._former = {}, {}, []
        self._places.clear()
        self._views.clear()
        for loan in loans:
            loan.release()

    def _find_places(self, fresh: dict[BucketId, Loan], likes: Sequence[Tensor], slots: _Slots) -> _Places:
        bytes_of = _bytes_of(fresh)
        homes = self._homes
        places = _Places([], [], [], slots)
        for index, (like, offset) in enumerate(zip(likes, parameter_offsets(self._plan), strict=True)):
            view = self._view_in_place(homes[index], fresh, bytes_of, like)
            if view is None:
                view = _joined(homes[index], bytes_of, like)
            if view is None:
                self._put_together(places, homes[index], bytes_of)
                view = parameter_view(self._arena, offset, like)
            places.values.append(view)
        return places

    def _view_in_place(
        self,
        home: list[tuple[Bucket, int, int]],
        fresh: dict[BucketId, Loan],
        bytes_of: dict[BucketId, Tensor],
        like: Tensor,
    ) -> Tensor | None:
        """The parameter in its server's slot, if all of it is there in one piece."""
        if not home or any(bucket.id not in fresh for bucket, _, _ in home):
            return None
        first, begin, _ = home[0]
        address = expected = bytes_of[first.id].data_ptr() + begin
        for bucket, start, end in home:
            if bytes_of[bucket.id].data_ptr() + start != expected:
                return None
            expected += end - start
        slot = fresh[first.id].buffer.obj
        if any(fresh[bucket.id].buffer.obj is not slot for bucket, _, _ in home):
            return None
        whole = as_tensor(memoryview(slot), torch.uint8)
        offset = address - whole.data_ptr()
        nbytes = like.numel() * ELEMENT_BYTES[dtype_name(like.dtype)]
        return whole[offset : offset + nbytes].view(like.dtype).as_strided(like.shape, like.stride())

    def _put_together(
        self, places: _Places, home: list[tuple[Bucket, int, int]], bytes_of: dict[BucketId, Tensor]
    ) -> None:
        for bucket, start, end in home:
            source = bytes_of.get(bucket.id)
            if source is not None:
                places.sources.append(source[start:end])
                places.targets.append(self._arena[bucket.arena_offset + start : bucket.arena_offset + end])


def _homes(plan: Plan) -> list[list[tuple[Bucket, int, int]]]:
    """For each parameter its pieces: bucket, and the range of bytes in it."""
    homes: list[list[tuple[Bucket, int, int]]] = [[] for _ in plan.parameters]
    for bucket in plan.buckets:
        size = ELEMENT_BYTES[bucket.dtype]
        for piece in bucket.pieces:
            homes[piece.parameter].append((bucket, piece.offset, piece.offset + piece.elements * size))
    return homes


def _bytes_of(loans: dict[BucketId, Loan]) -> dict[BucketId, Tensor]:
    return {bucket: as_tensor(loan.buffer, torch.uint8) for bucket, loan in loans.items()}


def _slots_of(loans: Iterable[Loan]) -> _Slots:
    return tuple(loan.buffer.obj for loan in loans)


def _joined(home: list[tuple[Bucket, int, int]], bytes_of: dict[BucketId, Tensor], like: Tensor) -> Tensor | None:
    """The parameter's pieces, all of them lent, mapped side by side."""
    if not like.numel() or any(bucket.id not in bytes_of for bucket, _, _ in home):
        return None
    pages = join_pages([(bytes_of[bucket.id].data_ptr() + start, end - start) for bucket, start, end in home])
    if pages is None:
        return None
    return as_tensor(pages, torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())
