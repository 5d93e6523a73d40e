"""How the processes of a launcher meet, and which task of the cluster each becomes."""

from __future__ import annotations

import itertools

from lockstep.errors import BadInput
from lockstep.library.launcher import Launch
from lockstep.protocol.core.ids import JobId, Role, TaskId
from lockstep.runtime.monitor.door import RunLink
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.runtime.startup.rendezvous import RendezvousError, RendezvousSpec, meet
from lockstep.security.chosen import chosen_key
from lockstep.security.key import Purpose
from lockstep.terminal import say
from lockstep.transports.control.addresses import parse_address
from lockstep.transports.control.ports import ReservedPort
from lockstep.version import __version__

_meetings = itertools.count()
"""Of this process, in the launcher's store."""


def gather(spec: ClusterSpec, launch: Launch, link: RunLink | None, servers: int, port: int) -> ClusterSpec:
    """The cluster of all that the launcher started; this process listens on ``port``. BadInput if they do not meet.

    ``link``: to ``lockstep run``, which remembers whom a former life of this process has met.
    """
    if servers >= launch.world:
        raise BadInput(
            f"{launch.launcher} started {launch.world} processes, and servers={servers} leaves none to train; start at "
            "least one more process than there are servers."
        )
    met = () if link is None else link.met
    try:
        hosts = met or _meet(spec, launch, port, f"{next(_meetings)}")
    except RendezvousError as error:
        raise BadInput(str(error)) from None
    if link is not None:
        link.remember(hosts)
    is_server = launch.rank < servers
    task = TaskId(Role.SERVER if is_server else Role.WORKER, launch.rank if is_server else launch.rank - servers)
    return spec.with_hosts(hosts[:servers], hosts[servers:]).for_task(task)


def _meet(spec: ClusterSpec, launch: Launch, port: int, name: str) -> tuple[str, ...]:
    """Where every rank listens, in order. ``name``: tells this meeting of these ranks from others."""
    key = None if (known := chosen_key()) is None else known.sub(Purpose.RENDEZVOUS)
    same = {"rank": launch.rank, "world": launch.world}
    if launch.store is not None:
        from lockstep.library.store_meeting import StoreMeeting, meet_in_store

        meeting = StoreMeeting(
            **same,
            store=launch.store,
            name=f"{launch.attempt}/{name}",
            timeout=spec.startup_timeout,
            version=__version__,
            key=key,
        )
        return meet_in_store(meeting, port, say)
    by_rank_0 = RendezvousSpec(
        **same, address=launch.address, timeout=spec.startup_timeout, version=__version__, key=key, bind=spec.bind
    )
    return meet(by_rank_0, port, say)


def find_store(spec: ClusterSpec, launch: Launch, job: JobId, port: int) -> tuple[str, int]:
    """Where worker 0 keeps the store of torch.distributed; ``port``: of this process's own, if it is worker 0.

    Each job has a store of its own: below ``lockstep run`` its ranks may have met in another one before.
    JobEndedError would need a job that knows better: whoever does not come is missing, and named.
    """
    found = parse_address(_meet(spec, launch, port or 1, f"job {job:016x}")[0])
    return found.host, found.port


def port_for_store(spec: ClusterSpec) -> int:
    """Where worker 0 may keep such a store: a port that is free among those that tasks may use; 0: any."""
    if spec.second_ports is None:
        return 0
    with ReservedPort(spec.listen_address().host, spec.second_ports) as free:
        return free.port
