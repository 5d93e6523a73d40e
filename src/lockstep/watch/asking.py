"""How ``lockstep why`` finds a watched job of this user and asks its watcher: a file among those of running tasks has
the name of a Unix socket, in a folder that only this user can enter."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.diagnose.verdict import MAX_BYTES, Diagnosis, read_diagnosis
from lockstep.foreign import plain, read_json
from lockstep.runtime.running_jobs import keep_entry, kept_entries

SOCKET: Final = "why.sock"
ANSWER_SECONDS: Final = 20.0
"""A watcher looks at all ranks for it, on a busy host several times."""
_SEND_SECONDS: Final = 2.0
_LONGEST: Final = 300


@dataclass(frozen=True, slots=True)
class ListedWatch:
    """One watched job of this user, whose watcher runs on this host."""

    watched: str
    """The job's number."""
    socket: str
    command: str
    folder: str
    """The folder it was started in."""
    started: float


class WatchDoor:
    """The watcher's end. Whoever connects gets a diagnosis; the watcher's loop makes it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SOCKET
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(str(self.path))
        self._socket.listen(8)

    def fileno(self) -> int:
        """Readable when somebody asks."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def serve(self, diagnosis: Callable[[], Diagnosis]) -> None:
        """Answer all that have come, if any has."""
        callers = []
        with contextlib.suppress(OSError):
            while True:
                callers.append(self._socket.accept()[0])
        answer = diagnosis().to_json() if callers else b""
        for caller in callers:
            with contextlib.suppress(OSError), caller:
                caller.settimeout(_SEND_SECONDS)
                caller.sendall(answer)


@contextlib.contextmanager
def findable(folder: Path, number: str, command: Sequence[str]) -> Iterator[WatchDoor]:
    """Until the block ends, ``lockstep why`` finds this watcher. ``folder``: one that only this user can enter."""
    with contextlib.closing(WatchDoor(folder)) as door:
        words = plain(" ".join(command), _LONGEST)
        entry = ListedWatch(number, str(door.path), words, os.getcwd(), time.time())
        with keep_entry(json.dumps(asdict(entry)).encode()):
            yield door


def watched_jobs() -> list[ListedWatch]:
    """This user's watched jobs on this host, the newest first."""
    found = [one for one in map(read_entry, kept_entries()) if one is not None]
    return sorted(found, key=lambda one: one.started, reverse=True)


def read_entry(data: bytes) -> ListedWatch | None:
    """None: it is something else."""
    try:
        fields: Any = read_json(data)
        texts = [plain(str(fields[name]), 4096) for name in ("watched", "socket", "command", "folder")]
        return ListedWatch(texts[0], texts[1], texts[2], texts[3], float(fields["started"]))
    except (ValueError, KeyError, TypeError, OverflowError):
        return None  # a task of ours, or of another version


def ask(job: ListedWatch) -> Diagnosis:
    """What its watcher says now. OSError if it does not answer, ReportError if that is no diagnosis."""
    deadline = time.monotonic() + ANSWER_SECONDS
    parts: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(job.socket)
        while sum(map(len, parts)) <= MAX_BYTES:
            connection.settimeout(max(0.1, deadline - time.monotonic()))
            part = connection.recv(1 << 16)
            if not part:
                break
            parts.append(part)
    return read_diagnosis(b"".join(parts))
