"""A server: a node that keeps a share of the parameters."""

from __future__ import annotations

from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.task.node import Node, Say
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.share_side import MakeStore, ShareSide
from lockstep.runtime.task.store import StoreTimes

__all__ = ["MakeStore", "ServerNode"]


class ServerNode(Node):
    """One server of the cluster."""

    share: ShareSide

    def __init__(self, config: NodeConfig, make_store: MakeStore, say: Say, reporter: TaskReporter) -> None:
        super().__init__(config, say, reporter)
        self.share = ShareSide(self, make_store)
        self.memory, self.tell_unsaved = self.share.memory, self.share.saving.tell_unsaved
        self._compose(self.share)

    @property
    def store_times(self) -> StoreTimes:
        """Where the time of the store's thread has gone."""
        return self.share.times
