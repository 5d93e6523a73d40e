"""What the runtime needs to know about one task of a library job."""

from __future__ import annotations

import dataclasses

from lockstep.library.settings import (
    FIRST_LIFE,
    OWN,
    TORCH,
    Exchange,
    Keeping,
    Life,
    library_settings,
    loss_notice,
    recovery_rules,
)
from lockstep.protocol.coordinator.recovery import Beginning
from lockstep.protocol.core.ids import CHIEF
from lockstep.runtime.checkpoint.resuming import beginning_in
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.watch.watchdog import WatchSettings
from lockstep.terminal import say


def node_config(
    cluster: ClusterSpec,
    exchange: Exchange,
    keeping: Keeping,
    *,
    launched: bool = False,
    carrier: str = "",
    life: Life = FIRST_LIFE,
    server_device: str = "cpu",
) -> NodeConfig:
    """What the runtime needs to know about a job of the library. BadInput if its ``train_dir`` is refused.

    ``launched``: by a launcher, without ``lockstep run``. ``carrier``: without servers, what carries the gradients.
    ``life``: what ``lockstep run`` makes of this process. ``server_device``: where this task updates, if it serves.
    """
    workers, servers = cluster.shape.workers, cluster.shape.servers
    rules = recovery_rules(
        keeping,
        exchange,
        workers,
        cluster.rejoin_timeout,
        launched=launched,
        servers=servers,
        grace_seconds=cluster.grace,
        goes_back=life.everybody_restarts,
        server_replicas=cluster.server_replicas,
        ranks_return=life.everybody_restarts and carrier == OWN,
    )
    settings = library_settings(cluster, exchange, rules, carrier, life, server_device)
    if returning := life.later and (rules.returns or rules.ranks_return):
        cluster = dataclasses.replace(cluster, startup_timeout=cluster.rejoin_timeout)
    resumes = bool(keeping.train_dir) and cluster.task == cluster.shape.coordinator
    if (
        cluster.task == CHIEF
        and (notice := loss_notice(rules, exchange, workers, launched=launched, servers=servers, carrier=carrier))
        and workers > 1
    ):
        say(notice)
    return NodeConfig(
        tell_paths=carrier != TORCH,  # no tensor takes the links then
        cluster=cluster,
        settings=settings,
        synchronous=exchange.synchronous,
        eager=not cluster.shape.servers,
        summed=exchange.reduction == "sum",
        aggregate=exchange.aggregate(workers),
        watch=WatchSettings(on_stall=cluster.on_stall, pages=cluster.pages),
        recovery=rules,
        # A rank that comes back most likely joins a job that runs, and nothing begins.
        beginning=beginning_in(
            keeping.train_dir,
            settings,
            (lambda _line: None) if life.later and rules.ranks_return else say,
            from_scratch=keeping.from_scratch and not life.later,
        )
        if resumes
        else Beginning(),
        train_dir=keeping.train_dir,
        checkpoints_kept=keeping.max_ckpts_to_keep,
        own_program=True,
        returning=returning,
        later=life.later and bool(rules.server_replicas) and not rules.returns and cluster.task in cluster.shape.homes,
        former_job=life.former_job if cluster.task in cluster.shape.server_ids() else 0,
        finished=life.finished and (rules.returns or rules.ranks_return),
    )
