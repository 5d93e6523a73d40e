"""The folder of a run: what a task leaves behind goes there, and nothing else makes or opens files in it.

It is the folder that the user named, or else one named after the job's number in this user's folder under the temporary
directory (``lockstep.private_files`` says how other users are kept out); it is made when the first file is written. A
full disk or a missing folder becomes a sentence, never an exception.

Unnamed folders do not pile up: a task that makes one removes those of this user that are older than 14 days or not
among the newest 32, unless their job still runs here. A running task holds a shared lock on its run's folder, even if
another task made it; only a folder that nobody has locked is removed. A task that dies, however it dies, leaves no lock
behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lockstep.private_files import (
    FOLDER_MODE,
    NotOurs,
    append,
    named_folder,
    own_folder,
    user_folder,
    user_folders,
    write_whole,
)

KEEP_SECONDS: Final = 14 * 24 * 3600.0
KEEP_FOLDERS: Final = 32
_NAME: Final = re.compile(r"[0-9a-f]{16}|forming-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class WriteResult:
    """The result of an attempt to write to the folder."""

    where: Path | None
    """The folder that was written to."""
    problem: str = ""
    """What failed, or why another folder than the named one was used."""


class RunFolder:
    """The folder of one task's run. Any thread may use it."""

    def __init__(self, asked: str, job: Callable[[], int]) -> None:
        """``job`` returns the job's number, 0 while there is none: a cluster that is forming has its own folder."""
        self._asked = Path(asked) if asked else None
        self._refused = ""
        self._job = job
        self._forming = f"forming-{secrets.token_hex(8)}"
        self._where: Path | None = None
        # Guards only what is held: writing may take long on a failing disk, and other threads must not wait for that.
        self._lock = threading.Lock()
        self._held = -1
        self._held_name = ""
        self._closed = False

    @property
    def is_named(self) -> bool:
        """The user named it, so it is meant for more than reports of failures."""
        return self._asked is not None and not self._refused

    @property
    def nearest(self) -> Path:
        """The folder of the run, or the folder in which it will be made."""
        if self._where is not None:
            return self._where
        if self._asked is not None:
            return self._asked if self._asked.exists() else self._asked.parent
        return Path(tempfile.gettempdir())

    def write(self, files: Mapping[str, bytes]) -> WriteResult:
        """Write each file whole or not at all."""

        def all_files(folder: int) -> None:
            for name, data in files.items():
                write_whole(folder, name, data)

        return self._leave(all_files, make=True)

    def append(self, name: str, data: bytes, make: bool) -> WriteResult:
        """Append to a file; unless ``make``, only in a folder that already exists."""
        return self._leave(lambda folder: append(folder, name, data), make)

    def hold(self) -> None:
        """If another task of this job has made the folder, keep it from being removed while this task runs."""
        if (self._asked is None or self._refused) and self._held_name != self._name:
            with contextlib.suppress(OSError), self._own(make=False):
                pass

    def close(self) -> None:
        """This task leaves; the folder may be removed once it is old."""
        with self._lock:
            self._closed = True
            self._let_go()

    @property
    def _name(self) -> str:
        job = self._job()
        return f"{job:016x}" if job else self._forming

    def _leave(self, act: Callable[[int], None], make: bool) -> WriteResult:
        if self._asked is not None and not self._refused:
            left = self._in_the_named(self._asked, act, make)
            if left is not None:
                return left
        return self._in_our_own(act, make)

    def _in_the_named(self, asked: Path, act: Callable[[int], None], make: bool) -> WriteResult | None:
        """None if the folder belongs to another user: then this user's own one takes its place."""
        with contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(named_folder(asked, make))
            except NotOurs as error:
                self._refused = (
                    f"no report is written to {asked}: {error.strerror}; give --train_dir a folder that you own"
                )
                return None
            except OSError as error:
                return WriteResult(None, f"cannot write to {asked}: {error.strerror or error}")
            try:
                act(folder)
            except OSError as error:
                return WriteResult(None, f"cannot write to {asked}: {error.strerror or error}")
        self._where = asked
        return WriteResult(asked)

    def _in_our_own(self, act: Callable[[int], None], make: bool) -> WriteResult:
        where = Path(tempfile.gettempdir())
        try:
            with self._own(make) as (where, folder):
                act(folder)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not make:
                return WriteResult(None)
            return WriteResult(
                None, f"cannot write to {where}: {error.strerror or error}; set TMPDIR to another folder"
            )
        self._where = where
        return WriteResult(where, self._refused)

    @contextlib.contextmanager
    def _own(self, make: bool) -> Iterator[tuple[Path, int]]:
        name, is_new = self._name, False
        with user_folder(make) as (base, parent):
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, FOLDER_MODE, dir_fd=parent)
                    is_new = True
            with own_folder(name, parent) as folder:
                self._take_hold(name, folder)
                if is_new:
                    prune(parent)
                yield base / name, folder

    def _take_hold(self, name: str, folder: int) -> None:
        with contextlib.suppress(OSError):  # some file systems have no locks; nothing is removed there either
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with self._lock:
            if not self._closed:
                self._let_go()
                # The lock belongs to the open file description, so the copy of the descriptor keeps it.
                self._held, self._held_name = os.dup(folder), name

    def _let_go(self) -> None:
        if self._held >= 0:
            os.close(self._held)
        self._held, self._held_name = -1, ""


def run_folders() -> list[Path]:
    """This user's unnamed run folders, the newest first; those of other users are not looked at."""
    found: list[tuple[float, Path]] = []
    for base in user_folders():
        with contextlib.suppress(OSError), own_folder(base) as parent:
            found += [(written, base / name) for written, name in _folders_in(parent)]
    return [path for _, path in sorted(found, reverse=True)]


def prune(parent: int) -> None:
    """Remove the old folders of dead jobs below this open folder."""
    oldest = time.time() - KEEP_SECONDS
    for place, (written, name) in enumerate(sorted(_folders_in(parent), reverse=True)):
        if place < KEEP_FOLDERS and written >= oldest:
            continue
        with contextlib.suppress(OSError), own_folder(name, parent) as folder:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(name, dir_fd=parent)


def _folders_in(parent: int) -> Iterator[tuple[float, str]]:
    """When each of this user's folders was last written to, and its name."""
    with os.scandir(parent) as entries:
        for entry in entries:
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_uid == os.geteuid():
                        yield found.st_mtime, entry.name
