"""Twins: memory on the GPU beside a region of host memory, which a peer on the same GPU reads instead of the region.

A worker and a server on one GPU exchange loans of host memory, as over any link that shares memory: journal, waits and
fencing know nothing else. If both have opened the other's twin, the bytes themselves stay on the GPU: the lender fills
the twin, the borrower reads the twin at the offset of the loan. A twin always holds what its region would hold; the
region itself is only filled while somebody may read it.

Like events (``shared_events.py``), twins are offered in memory that the peer has mapped, and it has only mapped it
after both ends have proven themselves at the door of shared memory. Behind its tensors each end writes a table with the
handle of its memory and, bit by bit, whose memory it has opened or could not open.
Only where nothing relies on what a dying task has passed on: its memory on the GPU ends with it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from lockstep.training.gpu.ipc_memory import HANDLE_BYTES, CannotShareError, GpuMemory

_MAGIC: Final = b"LSGPUMEM"
_TABLE: Final = struct.Struct(f"<8s16sIII4xQQQ{HANDLE_BYTES}s")
"""Magic, a digest of the GPU's UUID, process, index of the owner among its kind, how many of its kind there are, where
the twin begins in the memory of the handle, its size, the size of that memory, and the handle."""
_BITS: Final = struct.Struct("<Q")
_OPENED_AT, _REFUSED_AT = _TABLE.size, _TABLE.size + _BITS.size
TWIN_BYTES: Final = _TABLE.size + 2 * _BITS.size
_ALIGNMENT: Final = 512
MOST_TASKS: Final = 64
_MOST_BYTES: Final = 1 << 44


@dataclass(frozen=True, slots=True)
class TwinTable:
    """What the owner of a region tells of its twin."""

    gpu: bytes
    process: int
    owner: int
    of: int
    """How many tasks of the owner's kind the job has."""
    offset: int
    nbytes: int
    total: int
    handle: bytes

    def write(self, memory: memoryview, at: int) -> None:
        """Write the table there; no peer's memory is opened yet."""
        _TABLE.pack_into(
            memory,
            at,
            _MAGIC,
            self.gpu,
            self.process,
            self.owner,
            self.of,
            self.offset,
            self.nbytes,
            self.total,
            self.handle,
        )
        memory[at + _OPENED_AT : at + TWIN_BYTES] = bytes(TWIN_BYTES - _OPENED_AT)


def read_twin(memory: memoryview, at: int) -> TwinTable | None:
    """The table there, if there is one and its numbers make sense."""
    if len(memory) < at + TWIN_BYTES:
        return None
    magic, *fields = _TABLE.unpack_from(memory, at)
    if magic != _MAGIC:
        return None
    table = TwinTable(*fields)
    fits = table.offset + table.nbytes <= table.total <= _MOST_BYTES
    return table if fits and table.owner < table.of <= MOST_TASKS else None


def _bit(memory: memoryview, at: int, index: int) -> bool:
    (bits,) = _BITS.unpack_from(memory, at)
    return 0 <= index < MOST_TASKS and bool(bits >> index & 1)


class OwnTwins:
    """The twins of this task's regions, in one allocation."""

    def __init__(self, gpu: GpuMemory, regions: Sequence[memoryview], nbytes: int, at: int) -> None:
        """``nbytes``: of the tensors in each region; its table is at ``at``. Nothing is offered yet."""
        self._gpu, self._regions, self._at, self._nbytes = gpu, regions, at, nbytes
        self._stride = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        self._whole = gpu.allocate(self._stride * len(regions))
        try:
            self._handle = gpu.handle_of(self._whole)
        except CannotShareError:
            gpu.free(self._whole)
            raise
        self.tensors = [self._whole[i * self._stride :][:nbytes] for i in range(len(regions))]

    @property
    def nbytes(self) -> int:
        """Of all of them, on the GPU."""
        return self._whole.numel()

    def offer(self, owner: int, of: int) -> None:
        """From now on whoever maps a region may open its twin."""
        for number, region in enumerate(self._regions):
            place = (number * self._stride, self._nbytes, self._whole.numel())
            TwinTable(self._gpu.gpu, self._gpu.process, owner, of, *place, self._handle).write(region, self._at)

    def tell(self, peer: int, *, opened: bool) -> None:
        """Whether this peer's twin could be opened here."""
        for region in self._regions:
            at = self._at + (_OPENED_AT if opened else _REFUSED_AT)
            (bits,) = _BITS.unpack_from(region, at)
            _BITS.pack_into(region, at, bits | 1 << peer)

    def close(self) -> None:
        """Free it; nothing that is queued uses it any more."""
        self.tensors.clear()
        self._gpu.free(self._whole)


class PeerTwin:
    """The twin of a region that a peer lends, opened here."""

    def __init__(self, table: TwinTable, tensor: Tensor, memory: memoryview, at: int) -> None:
        self.owner, self.of = table.owner, table.of
        self.tensor = tensor
        self._memory, self._at = memory, at

    def has_opened(self, index: int) -> bool:
        """Whether the peer has opened the twin of the task with this index."""
        return _bit(self._memory, self._at + _OPENED_AT, index)

    def has_refused(self, index: int) -> bool:
        """Whether it has tried in vain."""
        return _bit(self._memory, self._at + _REFUSED_AT, index)


@dataclass(frozen=True, slots=True)
class TwinLookup:
    """What became of the attempt to open the twin of a lent region."""

    twin: PeerTwin | None = None
    owner: int | None = None
    """The peer, if it offers a twin."""
    reason: str = ""
    """Why an offered twin was not opened."""


NO_TWIN: Final = TwinLookup()


class OpenedTwins:
    """The twins of all peers whose regions were seen here. One thread opens them; any may ask for those that are."""

    def __init__(self, gpu: GpuMemory) -> None:
        self._gpu = gpu
        self._known: dict[int, tuple[object, TwinLookup]] = {}
        """By the id of the mapping, which is kept alive so that no other gets it."""
        self._wholes: dict[tuple[int, bytes], Tensor] = {}
        """By process and handle: the regions of one task may have their twins in one memory."""
        self._relied_on: set[tuple[int, bytes]] = set()

    def get(self, lent: memoryview) -> PeerTwin | None:
        """The twin of the region that this is a part of, if it is open; never waits."""
        known = self._known.get(id(lent.obj))
        return None if known is None else known[1].twin

    def open(self, lent: memoryview, at: int, nbytes: int) -> tuple[TwinLookup, bool]:
        """Open the twin of the region that this is a part of, and whether this is the first look at that region.

        ``at``: where its table would be. ``nbytes``: the least that its twin must have.
        """
        known = self._known.get(id(lent.obj))
        if known is not None:
            return known[1], False
        found = self._open(memoryview(lent.obj).cast("B"), at, nbytes)
        self._known[id(lent.obj)] = lent.obj, found
        return found, True

    def _open(self, memory: memoryview, at: int, nbytes: int) -> TwinLookup:
        table = read_twin(memory, at)
        if table is None:
            return NO_TWIN
        if table.process == self._gpu.process:
            return TwinLookup(owner=table.owner, reason="both are in one process")
        if table.gpu != self._gpu.gpu:
            return TwinLookup(owner=table.owner, reason="they are on different GPUs")
        if table.nbytes < nbytes:
            return TwinLookup(owner=table.owner, reason=f"{table.nbytes} bytes are offered, {nbytes} are needed")
        key = (table.process, table.handle)
        try:
            whole = self._wholes.get(key)
            if whole is None:
                whole = self._wholes[key] = self._gpu.open(table.handle, table.total)
        except CannotShareError as error:
            if key in self._relied_on:
                raise  # the peer has stopped to fill its region
            return TwinLookup(owner=table.owner, reason=str(error))
        self._relied_on.add(key)
        tensor = whole[table.offset : table.offset + table.nbytes]
        return TwinLookup(PeerTwin(table, tensor, memory, at), table.owner)

    def all_have_opened(self, index: int) -> bool:
        """Whether every task of the peers' kind has its twin open here, and has opened that of the task ``index``."""
        twins = self._twins()
        having = {twin.owner for twin in twins if twin.has_opened(index)}
        return bool(twins) and having == set(range(max(twin.of for twin in twins)))

    def any_has_opened(self, index: int) -> bool:
        """Whether a peer may still read the twins of the task ``index``."""
        return any(twin.has_opened(index) for twin in self._twins())

    def _twins(self) -> list[PeerTwin]:
        return [lookup.twin for _, lookup in self._known.values() if lookup.twin is not None]

    def forget(self) -> None:
        """Close all of them: nothing that is queued uses them any more."""
        self._known.clear()
        wholes, self._wholes = self._wholes, {}
        for whole in wholes.values():
            self._gpu.close(whole)
