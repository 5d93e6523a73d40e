"""A worker: a node that trains. Without servers it is a rank: it also has a share of the buckets, and reads means."""

from __future__ import annotations

from lockstep.protocol.core.plan import Plan
from lockstep.runtime.monitor.reporter import TaskReporter
from lockstep.runtime.task.node import Node, Say
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.rank_means import RankMeans
from lockstep.runtime.task.share_side import MakeStore, ShareSide
from lockstep.runtime.task.training_side import TrainingSide
from lockstep.transports.base import Region


class WorkerNode(Node):
    """One worker of the cluster. What its training thread calls is described in ``training_side.py``."""

    means: RankMeans | None = None
    """What a rank reads instead of parameters."""

    def __init__(
        self, config: NodeConfig, say: Say, reporter: TaskReporter, make_store: MakeStore | None = None
    ) -> None:
        """``make_store``: makes the versions of its share of the buckets, if it is a rank."""
        super().__init__(config, say, reporter)
        self.training = side = TrainingSide(self)
        self.allocate, self.use, self.announce = side.allocate, side.use, side.announce
        self.offer_initial, self.begin_step, self.produced = side.offer_initial, side.begin_step, side.produced
        self.tell_begun, self.enter_step, self.seal = side.tell_begun, side.enter_step, side.seal
        self.tell_state, self.finish = side.tell_state, side.finish
        self.wait_version, self.wait_buckets, self.has_version = side.wait_version, side.wait_buckets, side.has_version
        self.ask, self.wait_norm, self.blocked, self.memory = side.ask, side.wait_norm, side.blocked, side.memory
        self.home_of = side.home_of
        if make_store is None:
            self._compose(side)
        else:
            self.share = ShareSide(self, make_store)
            self.means = RankMeans(side, ranks_return=self.rules.ranks_return)
            self._compose(side, self.share)

    @property
    def plan(self) -> Plan | None:
        return self.training.plan

    @property
    def gradients(self) -> Region | None:
        return self.training.gradients

    @property
    def parameters(self) -> Region | None:
        return self.training.parameters

    @property
    def reads_in_place(self) -> bool:
        return self.training.reads_in_place
