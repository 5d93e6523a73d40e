"""The ranks of a watched job on this host: who they are, how far each has come, and what its recorder holds."""

from __future__ import annotations

import contextlib
import http.client
import mmap
import os
import re
import socket
import struct
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from lockstep.flight.merging import merged_dumps
from lockstep.flight.reading import MAX_BYTES, DumpError, read_dump
from lockstep.flight.recording import Recording
from lockstep.foreign import JsonError, plain, read_json
from lockstep.private_files import read_plain
from lockstep.runtime.processes import descendants
from lockstep.watch import injected

DUMP_SECONDS: Final = 2.0
_RECORDERS: Final = ("fr_trace_json", "dump_nccl_trace_json")
"""As torch's server calls them. Torch without CUDA does not know the second."""
_NAME: Final = re.compile(r"rank(\d{1,6})\.(\d{1,10})\.status")
_MAX_FACTS: Final = 4 << 20
_MOST_RANKS: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class NamedBucket:
    """One bucket of DDP: how many elements it has, and some of its parameters."""

    elements: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What a rank has written down about itself."""

    world: int = 0
    local: int = 0
    """How many ranks its launcher has started on this host; 0: it does not say."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    buckets: tuple[NamedBucket, ...] = ()
    error: str = ""
    place: str = ""
    raised: float = 0.0
    """When its program raised that error, in seconds since 1970."""
    master: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank's process writes while it runs."""

    step: int = 0
    stepped: float = 0.0
    """When the last step ended; 0: none has."""
    beat: float = 0.0
    """When a thread of it last had the interpreter."""
    leaving: int = injected.RUNNING
    gathered: tuple[str, ...] = ()
    """Parameters of the last calls of FSDP that gather, the newest last."""
    reduced: tuple[str, ...] = ()


@dataclass(slots=True)
class RankProcess:
    """One rank here. ``files``: it has let us in, and these are its files, without their ending."""

    rank: int
    pid: int
    files: Path | None = None
    _shared: mmap.mmap | None = None

    def status(self) -> RankStatus:
        if self._shared is None and self.files is not None:
            with contextlib.suppress(OSError, ValueError), open(f"{self.files}.status", "rb") as file:
                self._shared = mmap.mmap(file.fileno(), injected.STATUS_BYTES, access=mmap.ACCESS_READ)
        if self._shared is None:
            return RankStatus()
        return read_status(self._shared)

    def facts(self) -> RankFacts:
        with contextlib.suppress(OSError, JsonError):
            return read_facts(read_plain(Path(f"{self.files}.json"), _MAX_FACTS)[0])
        return RankFacts()

    def dump(self) -> bytes:
        """What its recorder holds; what it has left behind, if it does not answer any more. Empty: nothing."""
        if self.files is None:
            return b""
        asked = [_asked(f"{self.files}.sock", handler) for handler in _RECORDERS]
        return merged_dumps(*asked) if any(asked) else self.left()

    def left(self) -> bytes:
        """What it has left behind. One that is gone is not asked: processes that it has started may keep its socket
        open, and nobody answers there."""
        return merged_dumps(*map(self._left, injected.DUMPS))

    def _left(self, ending: str) -> bytes:
        with contextlib.suppress(OSError):
            return read_plain(Path(f"{self.files}{ending}"), MAX_BYTES + 1)[0]
        return b""

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _asked(path: str, handler: str) -> bytes:
    """A recorder's calls, from torch's own server in that process; it needs no interpreter for that."""
    connection = _UnixConnection(path, DUMP_SECONDS)
    try:
        connection.request("POST", f"/handler/{handler}")
        answer = connection.getresponse()
        data = answer.read(MAX_BYTES + 1)
        return data if answer.status == http.client.OK else b""
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def dumps_of(ranks: Iterable[RankProcess]) -> dict[int, bytes]:
    """The dumps of all that answer, taken together."""
    wanted = list(ranks)
    if not wanted:
        return {}
    pool = ThreadPoolExecutor(min(32, len(wanted)), thread_name_prefix="dumps")
    try:
        asked = {one.rank: pool.submit(one.dump) for one in wanted}
        wait(asked.values(), timeout=2 * DUMP_SECONDS)
        done = {rank: future.result() for rank, future in asked.items() if future.done() and not future.exception()}
        return {rank: dump for rank, dump in done.items() if dump}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def recording_of(dump: bytes, rank: int, now: float, facts: RankFacts) -> Recording | None:
    """A dump with the members of its groups, which gloo does not write into it."""
    try:
        recording = read_dump(dump, rank, now)
    except DumpError:
        return None
    return replace(recording, members={**recording.members, **facts.groups})


def registered_in(folder: Path) -> list[tuple[int, int]]:
    """Rank and process of all that have let us in, in the order in which they came."""
    found = []
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match is not None:
            with contextlib.suppress(OSError):
                found.append((os.stat(folder / name).st_mtime, int(match[1]), int(match[2])))
    return [(rank, pid) for _, rank, pid in sorted(found)]


def read_status(data: mmap.mmap | bytes) -> RankStatus:
    mark, step, stepped, beat, leaving, calls = injected.STATUS.unpack_from(data, 0)
    if mark != injected.MARK or not 0 <= step < 1 << 62 or not 0 <= calls < 1 << 62:
        return RankStatus()
    gathered: list[str] = []
    reduced: list[str] = []
    for call in range(max(0, calls - injected.RING), calls):
        at = injected.RING_AT + call % injected.RING * injected.SLOT
        (slot,) = struct.unpack_from(f"{injected.SLOT}s", data, at)
        text = plain(slot[1:].rstrip(b"\0").decode(errors="replace"))
        (gathered if slot[:1] == b"g" else reduced).append(text)
    return RankStatus(step, stepped, beat, leaving, tuple(gathered), tuple(reduced))


def read_facts(data: bytes) -> RankFacts:
    fields: Any = read_json(data, _MAX_FACTS)
    if not isinstance(fields, dict):
        return RankFacts()
    groups = fields.get("groups")
    buckets = fields.get("buckets")
    return RankFacts(
        world=_whole(fields.get("world")),
        local=_whole(fields.get("local")),
        groups={
            plain(str(name)): tuple(_whole(rank) for rank in ranks)
            for name, ranks in (groups.items() if isinstance(groups, dict) else ())
            if isinstance(ranks, list)
        },
        buckets=tuple(
            NamedBucket(_whole(one.get("elements")), tuple(plain(str(name), 200) for name in names))
            for one in (buckets if isinstance(buckets, list) else ())
            if isinstance(one, dict) and isinstance(names := one.get("names"), list)
        ),
        error=plain(str(fields.get("error", "")), 2000),
        place=plain(str(fields.get("place", "")), 500),
        raised=float(raised) if isinstance(raised := fields.get("raised"), float) else 0.0,
        master=plain(str(fields.get("master", "")), 300),
        port=_whole(int(port) if (port := str(fields.get("port", ""))).isdecimal() and len(port) < 6 else 0),
    )


def _whole(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0


# -- ranks that have not let us in: by the variables of their processes --


def ranks_below(pids: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Process and world of every rank among these processes and all that they have started, by its number.

    A rank's helpers inherit its variables; the rank is the one nearest to the launcher.
    """
    found: dict[int, tuple[int, int]] = {}
    started: dict[int, tuple[int, int]] = {}
    """The same by torchrun, to which a platform may itself have given the variables of a rank."""
    for pid in (one for top in pids for one in (top, *(facts.pid for facts in descendants(top)))):
        variables = _variables(pid)
        rank, world = variables.get("RANK", ""), variables.get("WORLD_SIZE", "")
        if rank.isdecimal() and world.isdecimal() and int(rank) < min(int(world), _MOST_RANKS):
            known = started if "TORCHELASTIC_RUN_ID" in variables else found
            known.setdefault(int(rank), (pid, int(world)))
    return {**found, **started}


def _variables(pid: int) -> dict[str, str]:
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (one.partition(b"=") for one in data.split(b"\0"))
    wanted = (b"RANK", b"WORLD_SIZE", b"TORCHELASTIC_RUN_ID")
    return {name.decode(): value.decode(errors="replace") for name, _, value in pairs if name in wanted}
