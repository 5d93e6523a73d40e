"""GPU events shared by a worker and a server on one GPU: the GPU itself waits, and no thread has to be woken.

Without them a bucket is passed on when its copy is done: a thread waits for the copy and wakes the loop, which notifies
the server, which queues the update, and the same way back; meanwhile the GPU is idle. With them each end queues its
part ahead of time, behind the other's event, and passes on at once what will be there when that event has passed.

Events are exchanged through memory that both ends map: behind its tensors each end writes a table with the handles of
its own events and, once it has opened the other's, the peers that may rely on that. The plan tells both ends where it
is.
This is used only if nothing relies on what a dying task has passed on, so not if lost tasks may rejoin.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.training.gpu.pinned_memory import forget_error

_MAGIC = b"LSEVENTS"
_GPU_BYTES = 16
_HEADER = struct.Struct("<8s16sIIIIQ")
"""Magic, a digest of the GPU's UUID, process, index of the owner among its kind, buckets, unused, and one bit per peer
that may rely on its events being opened here."""
_READERS = struct.Struct("<Q")
_READERS_AT = _HEADER.size - _READERS.size
_HANDLE_BYTES = 64
_ALIGNMENT = 64
_MOST_PEERS = 64


def spare_bytes(buckets: int) -> int:
    """Room for a table behind the tensors of a region."""
    return _ALIGNMENT + _HEADER.size + buckets * _HANDLE_BYTES


def table_at(nbytes: int) -> int:
    """Where the table is, behind this many bytes of tensors."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class Table:
    """What one end publishes about its events for the other."""

    gpu: bytes
    process: int
    owner: int
    handles: tuple[bytes, ...]

    def write(self, memory: memoryview, at: int) -> None:
        """Write the table there, with no reader yet."""
        begin = at + _HEADER.size
        for number, handle in enumerate(self.handles):
            memory[begin + number * _HANDLE_BYTES : begin + (number + 1) * _HANDLE_BYTES] = handle
        header = _HEADER.pack(_MAGIC, self.gpu, self.process, self.owner, len(self.handles), 0, 0)
        memory[at:begin] = header


def read_table(memory: memoryview, at: int, buckets: int) -> Table | None:
    """The table there, if there is one for this many buckets."""
    begin = at + _HEADER.size
    if len(memory) < begin + buckets * _HANDLE_BYTES:
        return None
    magic, gpu, process, owner, count, _, _ = _HEADER.unpack_from(memory, at)
    if magic != _MAGIC or count != buckets or owner >= _MOST_PEERS:
        return None
    ends = range(begin, begin + (buckets + 1) * _HANDLE_BYTES, _HANDLE_BYTES)
    handles = tuple(bytes(memory[first:last]) for first, last in itertools.pairwise(ends))
    return Table(gpu, process, owner, handles)


def let_read(memory: memoryview, at: int, peer: int) -> None:
    """This peer may rely on its events being opened here."""
    (readers,) = _READERS.unpack_from(memory, at + _READERS_AT)
    _READERS.pack_into(memory, at + _READERS_AT, readers | 1 << peer)


def is_let_read(memory: memoryview, at: int, peer: int) -> bool:
    """Whether the owner of this table has opened the events of this peer."""
    (readers,) = _READERS.unpack_from(memory, at + _READERS_AT)
    return peer < _MOST_PEERS and bool(readers >> peer & 1)


class OwnEvents:
    """The events of one task, one per bucket, in tables that its peers read."""

    def __init__(self, device: torch.device, owner: int, buckets: int, memories: Sequence[memoryview], at: int) -> None:
        """``memories``: the regions that peers map; the table is at ``at`` in each."""
        self._memories, self._at = memories, at
        with torch.cuda.device(device):
            self._events = [torch.cuda.Event(interprocess=True) for _ in range(buckets)]
            handles = tuple(event.ipc_handle() for event in self._events)
        table = Table(gpu_of(device), os.getpid(), owner, handles)
        for memory in memories:
            table.write(memory, at)

    def record(self, bucket: int, stream: torch.cuda.Stream) -> None:
        """This bucket waits for everything queued on this stream so far."""
        self._events[bucket].record(stream)

    def let_read(self, peer: int) -> None:
        for memory in self._memories:
            let_read(memory, self._at, peer)


class PeerEvents:
    """The events of one peer, opened here."""

    def __init__(self, table: Table, events: Sequence[torch.cuda.Event], memory: memoryview, at: int) -> None:
        self.owner = table.owner
        self._events = events
        self._memory, self._at = memory, at

    def wait(self, bucket: int, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for what the peer queued last for this bucket."""
        stream.wait_event(self._events[bucket])

    def synchronize(self, bucket: int) -> None:
        """Wait for that on this thread."""
        self._events[bucket].synchronize()

    def lets_read(self, index: int) -> bool:
        """Whether the peer has opened the events of the task with this index."""
        return is_let_read(self._memory, self._at, index)


def open_events(lent: memoryview, at: int, buckets: int, device: torch.device) -> PeerEvents | None:
    """The events of the peer that lends this memory, if it has a table and both are on one GPU."""
    memory = memoryview(lent.obj).cast("B")
    table = read_table(memory, at, buckets)
    # A process cannot open its own handles, and on another GPU there is nothing to gain.
    if table is None or table.process == os.getpid() or table.gpu != gpu_of(device):
        return None
    try:
        events = [torch.cuda.Event.from_ipc_handle(device, handle) for handle in table.handles]
    except RuntimeError:  # from CUDA: containers, for example, may isolate two processes from each other
        forget_error()
        return None
    return PeerEvents(table, events, memory, at)


def is_on_gpu(lent: memoryview, at: int, buckets: int, gpu: bytes) -> bool:
    """Whether the peer that lends this memory is on this GPU, in another process."""
    table = read_table(memoryview(lent.obj).cast("B"), at, buckets)
    return table is not None and table.process != os.getpid() and table.gpu == gpu


class OpenedEvents:
    """The events of all peers whose memory was seen here, by that memory."""

    def __init__(self, device: torch.device, buckets: int, at: int) -> None:
        """``at``: where a peer's table is in its memory."""
        self._device, self._buckets, self._at = device, buckets, at
        self._known: dict[int, tuple[object, PeerEvents | None]] = {}
        """By the id of the mapping, which is kept alive so that no other gets it."""

    def open(self, lent: memoryview) -> tuple[PeerEvents | None, bool]:
        """The events of the peer that lends this, and whether this call opened them."""
        known = self._known.get(id(lent.obj))
        if known is not None:
            return known[1], False
        opened = open_events(lent, self._at, self._buckets, self._device)
        self._known[id(lent.obj)] = lent.obj, opened
        return opened, opened is not None

    def forget(self) -> None:
        """Nothing that is queued waits for them any more."""
        self._known.clear()


def gpu_of(device: torch.device) -> bytes:
    """Identifies the GPU on this host, whatever number a process gives it."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return hashlib.blake2b(uuid.encode(), digest_size=_GPU_BYTES).digest()
