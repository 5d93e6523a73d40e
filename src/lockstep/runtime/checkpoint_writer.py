"""Writes checkpoints on a thread of its own, beside training: a server's shard, and on the coordinator the manifest."""

from __future__ import annotations

import queue
import shutil
import threading
from collections.abc import Callable, Sequence

from lockstep.protocol.effects import WriteCheckpoint
from lockstep.protocol.messages import Saved
from lockstep.runtime.checkpoints import CheckpointError, CheckpointFolder, Manifest, with_shards
from lockstep.runtime.tensor_file import NamedTensor, write_tensors

_JOIN_SECONDS = 30.0
Say = Callable[[str], None]


class CheckpointWriter:
    """The disk's side of one server."""

    def __init__(self, folder: CheckpointFolder, keep: int, say: Say) -> None:
        """``keep``: how many checkpoints are left in the folder; 0: all."""
        self.folder = folder
        self._keep = keep
        self._say = say
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """After what is being written; may be called twice."""
        self._work.put(None)
        self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def write_shard(
        self, version: int, job: int, name: str, tensors: Sequence[NamedTensor], done: Callable[[Saved], None]
    ) -> None:
        """Write one shard; ``done`` gets what became of it, on the writer's thread."""
        self._work.put(lambda: done(self._write_shard(version, job, name, tensors)))

    def _write_shard(self, version: int, job: int, name: str, tensors: Sequence[NamedTensor]) -> Saved:
        part = self.folder.part(version, job)
        try:
            part.mkdir(parents=True, exist_ok=True)
            facts = write_tensors(part / name, tensors, {"version": str(version)})
        except OSError as error:
            # What is half written would keep the disk full.
            (part / name).unlink(missing_ok=True)
            return Saved(version, name, 0, "", f"{part / name}: {error.strerror or error}")
        return Saved(version, facts.name, facts.nbytes, facts.digest)

    def write_checkpoint(
        self, effect: WriteCheckpoint, job: int, manifest: Manifest, done: Callable[[str], None]
    ) -> None:
        """All shards are there: make the checkpoint; ``done`` gets the problem, or an empty text."""
        self._work.put(lambda: done(self._write_checkpoint(effect, job, manifest)))

    def _write_checkpoint(self, effect: WriteCheckpoint, job: int, manifest: Manifest) -> str:
        part = self.folder.part(effect.version, job)
        problem = next((shard.problem for shard in effect.shards if shard.problem), "")
        if not problem:
            try:
                self.folder.finish(part, with_shards(manifest, effect.shards), effect.states)
                self.folder.prune(self._keep)
                return ""
            except OSError as error:
                problem = f"{part}: {error.strerror or error}"
            except CheckpointError as error:
                problem = str(error)
        shutil.rmtree(part, ignore_errors=True)
        self._say(
            f"THE CHECKPOINT OF STEP {effect.version} COULD NOT BE WRITTEN: {problem}; training goes on, the "
            "checkpoints before it are kept, and another one is tried soon"
        )
        return problem
