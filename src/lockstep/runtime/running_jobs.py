"""Which tasks of this user run on this host: so ``lockstep why`` finds a job whose address nobody has written down.

Each monitor keeps one file in ``running`` in this user's folder (``lockstep.private_files`` says how other users are
kept out) and holds a lock on it. A process that ends, however it ends, releases its lock, even inside a container
whose process numbers mean nothing here. So a file that is not locked belongs to a dead task: it is ignored, and
removed by the next one that looks. A folder that cannot be written never keeps a task from running.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from lockstep.foreign import read_json
from lockstep.private_files import FOLDER_MODE, own_folder, read_held, user_folder, user_folders, write_held

FOLDER: Final = "running"
MAX_BYTES: Final = 1 << 20
_NAME: Final = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class ListedTask:
    """One task whose monitor runs here."""

    task: str
    cluster: Mapping[str, str]
    """Every task of its job with its address."""
    folder: str
    """The folder it was started in."""
    started: float


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job with at least one task on this host."""

    cluster: Mapping[str, str]
    here: tuple[ListedTask, ...]

    @property
    def address(self) -> str:
        """The address of one of its tasks here, as the cluster knows it."""
        return self.cluster[self.here[0].task]

    @property
    def started(self) -> float:
        return min(task.started for task in self.here)


@contextlib.contextmanager
def listed(task: str, address: str, cluster: Mapping[str, str], pid: int) -> Iterator[None]:
    """Keep this task among the running ones until the block ends.

    ``address`` counts where ``cluster`` does not have one for it; ``pid`` is the process that a person started.
    """
    folder = ""
    with contextlib.suppress(OSError):
        folder = os.readlink(f"/proc/{pid}/cwd")
    entry = ListedTask(task, {**cluster, task: cluster.get(task, address)}, folder, time.time())
    with keep_entry(json.dumps(asdict(entry)).encode()):
        yield


@contextlib.contextmanager
def keep_entry(data: bytes) -> Iterator[None]:
    """Keep a file among those of what runs, until the block ends or this process does."""
    name = secrets.token_hex(8)
    held = -1
    with contextlib.suppress(OSError), _folder(make=True) as parent:
        held = write_held(parent, name, data)
        _entries_in(parent)  # removes what the dead have left
    try:
        yield
    finally:
        if held >= 0:
            with contextlib.suppress(OSError), _folder(make=False) as parent:
                os.unlink(name, dir_fd=parent)
            os.close(held)


def running_jobs() -> list[LocalJob]:
    """This user's jobs with a task on this host, the newest first."""
    found: dict[tuple[tuple[str, str], ...], list[ListedTask]] = {}
    for task in filter(None, map(_read, kept_entries())):
        found.setdefault(tuple(sorted(task.cluster.items())), []).append(task)
    jobs = [LocalJob(here[0].cluster, tuple(sorted(here, key=lambda one: one.task))) for here in found.values()]
    return sorted(jobs, key=lambda job: job.started, reverse=True)


def kept_entries() -> list[bytes]:
    """What those that run have written."""
    found = []
    for base in user_folders():
        with contextlib.suppress(OSError), own_folder(base) as user, own_folder(FOLDER, user) as parent:
            found += _entries_in(parent)
    return found


@contextlib.contextmanager
def _folder(make: bool) -> Iterator[int]:
    with user_folder(make) as (_, user):
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(FOLDER, FOLDER_MODE, dir_fd=user)
        with own_folder(FOLDER, user) as parent:
            yield parent


def _entries_in(parent: int) -> list[bytes]:
    """The entries of what lives; those of the dead are removed."""
    found = []
    for name in os.listdir(parent):
        if not _NAME.fullmatch(name):
            continue  # it is being written, or is not ours
        with contextlib.suppress(OSError):
            data = read_held(parent, name, MAX_BYTES)
            if data is None:
                os.unlink(name, dir_fd=parent)
            else:
                found.append(data)
    return found


def _read(data: bytes) -> ListedTask | None:
    try:
        fields: dict[str, Any] = read_json(data, MAX_BYTES)
        cluster = {str(task): str(address) for task, address in fields["cluster"].items()}
        task, started = str(fields["task"]), float(fields["started"])
        if task not in cluster:
            return None
        return ListedTask(task, cluster, str(fields["folder"]), started)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # a watcher of somebody's job, or of another version
