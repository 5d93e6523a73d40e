"""What a task writes of a checkpoint: its shard, and on the coordinator's task the checkpoint itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lockstep.protocol.core.activity import ShardWrite
from lockstep.protocol.core.effects import WriteCheckpoint
from lockstep.protocol.core.events import CheckpointWritten, ShardSaved
from lockstep.protocol.core.messages import Layout, Saved
from lockstep.runtime.checkpoint.folder import CheckpointFolder, make_manifest
from lockstep.runtime.checkpoint.tensor_file import NamedTensor
from lockstep.runtime.checkpoint.writer import CheckpointWriter

if TYPE_CHECKING:
    from lockstep.runtime.task.node import Node

Take = Callable[[int], list[NamedTensor]]
"""A copy of what goes into the checkpoint of this version."""


class ShardSaving:
    """The files are written on the writer's own thread."""

    def __init__(self, node: Node) -> None:
        config = node.config
        self._node = node
        self._writer: CheckpointWriter | None = None
        if config.train_dir:
            self._writer = CheckpointWriter(CheckpointFolder(config.train_dir), config.checkpoints_kept, node.say)

    @property
    def writing(self) -> ShardWrite | None:
        """The part of a checkpoint that is being written."""
        return None if self._writer is None else self._writer.writing

    @property
    def written_at(self) -> float:
        """When this task completed a checkpoint, in seconds since 1970; 0: it has not."""
        return 0.0 if self._writer is None else self._writer.written_at

    def save(self, version: int, take: Take) -> None:
        """Copy the shard now; ``ShardSaved`` follows when it is on disk."""
        node, post = self._node, self._node.loop.post
        if self._writer is None:
            post(ShardSaved(Saved(version, "", 0, "", "this task was started without --train_dir")))
            return
        name = f"shard-{node.task.index}-of-{len(node.cluster.shape.savers)}.safetensors"
        self._writer.write_shard(version, node.job, name, take(version), lambda saved: post(ShardSaved(saved)))

    def write_checkpoint(self, effect: WriteCheckpoint, layout: Layout) -> None:
        """All shards are on disk; ``CheckpointWritten`` follows."""
        assert self._writer is not None
        node, config, shape, version = self._node, self._node.config, self._node.cluster.shape, effect.version
        # Fewer files than servers: one that is lost has left its shard to its second home.
        servers = min(shape.servers, len(effect.shards))
        manifest = make_manifest(layout, servers, shape.workers, version, node.job, config.settings, config.version)
        post = node.loop.post
        self._writer.write_checkpoint(effect, node.job, manifest, lambda p: post(CheckpointWritten(version, p)))

    def tell_unsaved(self) -> bool:
        """Whether the job succeeded but its last version could not be written; if so, report it as the last line.

        Known on the coordinator's task.
        """
        outcome = self._node.outcome
        if self._writer is None or not self._writer.failing or outcome is None or not outcome.ok:
            return False
        self._node.say(
            "THE LAST VERSION IS IN NO CHECKPOINT: all steps were made, but it could not be written to "
            f"{self._writer.folder.path}; a run restarted with this folder repeats what follows its newest checkpoint"
        )
        return True

    def close(self) -> None:
        """Wait for what is being written."""
        if self._writer is not None:
            self._writer.close()
