"""A server that has come as far as its first step."""

from __future__ import annotations

from protocol.protocol_rigs import ServerRig


def ready(*, workers: int = 2, servers: int = 1, buckets: int = 1, eager: bool = True) -> ServerRig:
    """A server whose buckets are all at version 0, with the rates of step 0."""
    rig = ServerRig(workers=workers, servers=servers, buckets=buckets, eager=eager)
    rig.initialise()
    rig.say_rates(0)
    return rig
