"""Writes checkpoints on its own thread, beside training: a server's shard, and on the coordinator the manifest.

No disk error ends that thread, and every request is answered: otherwise a job that waits for its checkpoint would wait
forever.
"""

from __future__ import annotations

import errno
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from lockstep.private_files import check_real_folder
from lockstep.protocol.core.activity import ShardWrite
from lockstep.protocol.core.effects import WriteCheckpoint
from lockstep.protocol.core.messages import Saved
from lockstep.protocol.core.timing import SAVE_AGAIN_SECONDS
from lockstep.runtime.checkpoint.folder import CheckpointError, CheckpointFolder, Manifest, with_shards
from lockstep.runtime.checkpoint.tensor_file import NamedTensor, write_tensors

_JOIN_SECONDS = 30.0
_MAKE_ROOM = "free some space on that disk"
_MAKE_WRITABLE = "make that folder writable for this user"
_MOVE_AWAY = "move away what is in its place"
_REMEDIES: Mapping[int | None, str] = MappingProxyType(
    {
        errno.ENOSPC: _MAKE_ROOM,
        errno.EDQUOT: _MAKE_ROOM,
        errno.EFBIG: "allow larger files there (ulimit -f)",
        errno.EROFS: _MAKE_WRITABLE,
        errno.EACCES: _MAKE_WRITABLE,
        errno.EPERM: _MAKE_WRITABLE,
        errno.ENOTDIR: _MOVE_AWAY,
        errno.EISDIR: _MOVE_AWAY,
        errno.EEXIST: _MOVE_AWAY,
        errno.ENOTEMPTY: _MOVE_AWAY,
    }
)
Say = Callable[[str], None]


class CheckpointWriter:
    """The part of one server that writes to disk."""

    def __init__(self, folder: CheckpointFolder, keep: int, say: Say) -> None:
        """``keep``: how many checkpoints stay in the folder; 0: all."""
        self.folder = folder
        self._keep = keep
        self._say = say
        self.writing: ShardWrite | None = None
        """What it writes now, for readers in other threads; replaced as a whole."""
        self.written_at = 0.0
        """When it completed its last checkpoint, in seconds since 1970; 0: none. Only on the coordinator's task."""
        self._told: set[str] = set()
        """Problems already reported that prevent checkpoints from being written; empty once one is written."""
        self._told_of_old: set[str] = set()
        """The same for the removal of old ones."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    @property
    def failing(self) -> bool:
        """Whether the last attempt to write a checkpoint failed; meaningful on the coordinator's server."""
        return bool(self._told)

    def close(self) -> None:
        """Ends the thread once the current write is done; may be called twice."""
        self._work.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the next checkpoint needs this thread, whatever failed
                self._say(f"the thread that writes checkpoints caught {type(error).__name__}: {error}; it continues")

    def write_shard(
        self, version: int, job: int, name: str, tensors: Sequence[NamedTensor], done: Callable[[Saved], None]
    ) -> None:
        """Write one shard; ``done`` receives the result, on the writer's thread."""
        self._work.put(lambda: done(self._write_shard(version, job, name, tensors)))

    def _write_shard(self, version: int, job: int, name: str, tensors: Sequence[NamedTensor]) -> Saved:
        part = self.folder.part(version, job)
        now = time.monotonic()
        self.writing = ShardWrite(str(part / name), now, now)
        try:
            part.mkdir(parents=True, exist_ok=True)  # another server may have been first
            check_real_folder(part)
            facts = write_tensors(part / name, tensors, {"version": str(version)}, self._wrote)
        except Exception as error:  # noqa: BLE001 - the coordinator waits for this answer, whatever failed
            problem = self._problem(error, name)
        else:
            return Saved(version, facts.name, facts.nbytes, facts.digest)
        finally:
            self.writing = None
        _remove_half(part / name)
        return Saved(version, name, 0, "", problem)

    def _wrote(self) -> None:
        if self.writing is not None:
            self.writing = replace(self.writing, wrote_at=time.monotonic())

    def write_checkpoint(
        self, effect: WriteCheckpoint, job: int, manifest: Manifest, done: Callable[[str], None]
    ) -> None:
        """All shards are written: complete the checkpoint; ``done`` receives the problem, or an empty text."""
        self._work.put(lambda: done(self._write_checkpoint(effect, job, manifest)))

    def _write_checkpoint(self, effect: WriteCheckpoint, job: int, manifest: Manifest) -> str:
        part = self.folder.part(effect.version, job)
        problem = next((shard.problem for shard in effect.shards if shard.problem), "")
        if not problem:
            try:
                self.folder.finish(part, with_shards(manifest, effect.shards), effect.states)
            except CheckpointError as error:
                problem = str(error)
            except Exception as error:  # noqa: BLE001 - the job waits for this answer, whatever failed
                problem = self._problem(error)
        if problem:
            shutil.rmtree(part, ignore_errors=True)
            self._tell_failure(effect.version, problem)
            return problem
        self.written_at = time.time()
        if self._told:
            self._told.clear()
            self._say(f"checkpoints can be written again: the one of step {effect.version} is in {self.folder.path}")
        self._clear_old(effect.version)
        return ""

    def _clear_old(self, written: int) -> None:
        """An old checkpoint that cannot be removed takes up space, but the new one is intact."""
        try:
            self.folder.prune(self._keep, written)
        except Exception as error:  # noqa: BLE001 - see above
            problem = self._problem(error)
        else:
            self._told_of_old.clear()
            return
        if problem not in self._told_of_old:
            self._told_of_old.add(problem)
            self._say(f"old checkpoints (--max_ckpts_to_keep={self._keep}) could not be removed from {problem}")

    def _tell_failure(self, version: int, problem: str) -> None:
        """Once while it lasts: a disk that stays full would otherwise be reported every few seconds."""
        if problem in self._told:
            return
        self._told.add(problem)
        self._say(
            f"THE CHECKPOINT OF STEP {version} COULD NOT BE WRITTEN: {problem}; earlier checkpoints are kept, and "
            f"while training continues the next attempt follows after {SAVE_AGAIN_SECONDS:.0f} s"
        )

    def _problem(self, error: Exception, name: str = "") -> str:
        """A phrase for people. It names the folder but not the step, so that it stays the same while it lasts."""
        where = f"{self.folder.path} ({name})" if name else str(self.folder.path)
        if not isinstance(error, OSError):
            return f"{where}: {type(error).__name__}: {error}; check that folder and this server's memory"
        remedy = _REMEDIES.get(error.errno, "check that disk")
        return f"{where}: {error.strerror or error}; {remedy}, or give another --train_dir at the next start"


def _remove_half(file: Path) -> None:
    """A half-written file would keep a full disk full. What cannot be removed is removed at the next start."""
    try:
        file.unlink(missing_ok=True)
    except OSError:
        return
