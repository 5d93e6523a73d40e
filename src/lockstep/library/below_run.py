"""A program that ``lockstep run`` has started: what it knows of its lives, and how it introduces itself."""

from __future__ import annotations

import os

from lockstep.errors import BadInput
from lockstep.library.settings import Life
from lockstep.runtime.monitor.door import Introduction, RunLink
from lockstep.runtime.task.node_config import NodeConfig
from lockstep.runtime.task.signals import TaskSignals
from lockstep.security.chosen import is_insecure
from lockstep.security.key import KEY_VARIABLE
from lockstep.version import __version__


def life_of(link: RunLink | None, *, can_be_told: bool) -> Life:
    """What ``lockstep run`` knows of this process. ``can_be_told``: all tasks of its job can be below one."""
    if link is None:
        return Life(can_be_told=can_be_told)
    return Life(
        can_be_told=can_be_told,
        restarted=True,
        later=link.later,
        finished=link.finished,
        former_job=link.former_job,
    )


def introduced(link: RunLink, config: NodeConfig, signals: TaskSignals) -> RunLink:
    """Let ``lockstep run``, which has started this process, answer for it."""
    cluster = config.cluster
    assert cluster.task is not None
    listen = cluster.listen_address()
    try:
        link.introduce(
            Introduction(
                task=str(cluster.task),
                host=listen.host,
                port=listen.port,
                version=__version__,
                cluster=cluster.all_addresses(),
                grace=cluster.grace,
                takes_back=config.recovery.of(cluster.shape).survives(cluster.task, cluster.shape),
                holds_buckets=cluster.task in cluster.shape.homes,
                key_file=os.environ.get(KEY_VARIABLE),
                insecure=is_insecure(),
                metrics_port=cluster.metrics.port,
                metrics_file=cluster.metrics.file,
            )
        )
    except BadInput:
        signals.close()
        raise
    return link
