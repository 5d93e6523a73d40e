"""Whole checkpoints, written through the writer as two servers would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helpers.waiting import wait_until
from lockstep.protocol.core.effects import WriteCheckpoint
from lockstep.protocol.core.messages import Layout, OptimizerEntry, ParameterEntry, Saved, Setting
from lockstep.runtime.checkpoint.folder import CheckpointFolder, make_manifest
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.checkpoint.writer import CheckpointWriter

JOB = 0x1122334455667788
SETTINGS = (Setting("model", "lenet"), Setting("number of servers", "2"), Setting("number of workers", "2"))
LAYOUT = Layout("hash", 64, (ParameterEntry("a.weight", 1000, "float32", 0),), (OptimizerEntry("SGD", "{}"),))


class Written:
    """Writes whole checkpoints through the writer, as two servers would."""

    def __init__(self, train_dir: Path, keep: int = 0, settings: tuple[Setting, ...] = SETTINGS) -> None:
        self._settings = settings
        self.said: list[str] = []
        self.folder = CheckpointFolder(train_dir)
        self.writer = CheckpointWriter(self.folder, keep, self.said.append)

    def write(self, version: int, nbytes: int = 4000, before_the_manifest: Callable[[], None] = lambda: None) -> str:
        """The problem, or an empty string. ``before_the_manifest`` is called when the shards are on disk."""
        shards: list[Saved] = []
        for index in range(2):
            data = memoryview(bytes([version % 256, index]) * (nbytes // 2))
            tensor = NamedTensor(f"value|0||part{index}", "U8", (nbytes,), data)
            self.writer.write_shard(version, JOB, f"shard-{index}-of-2.safetensors", [tensor], shards.append)
        wait_until(lambda: len(shards) == 2, 10, "both shards")
        before_the_manifest()
        done: list[str] = []
        effect = WriteCheckpoint(version, tuple(shards), ((0, b"state of 0"), (1, b"state of 1")))
        manifest = make_manifest(LAYOUT, 2, 2, version, JOB, self._settings, "test")
        self.writer.write_checkpoint(effect, JOB, manifest, done.append)
        wait_until(lambda: bool(done), 10, "the checkpoint")
        return done[0]
