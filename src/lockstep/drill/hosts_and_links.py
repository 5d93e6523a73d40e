"""Drills of paused hosts and broken links that had fooled us, each with a twin that must not be reported."""

from __future__ import annotations

from lockstep.drill.model import PS0, PS1, W1, Drill, Surroundings
from lockstep.protocol.core.causes import Cause

_STEPS = 400
"""Enough for the fault to strike, and to end soon after it has healed."""
_BRIEF = 1.0
"""Seconds: less than the shortest wait that is ever reported."""

HOSTS_AND_LINKS: tuple[Drill, ...] = (
    # -- a link is reset: that is not a death --
    Drill(
        name="link-reset",
        group="network",
        story="a firewall resets all connections between a worker and a server that others hear, then it heals",
        around=Surroundings(cut=(W1, PS1, "reset")),
        servers=2,
        cause=Cause.LINK_DOWN,
        pair=(W1, PS1),
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="coordinator-reset",
        group="network",
        story="the same between a worker and the only server: each takes the other for gone, the other worker does not",
        around=Surroundings(cut=(W1, PS0, "reset")),
        cause=Cause.LINK_DOWN,
        pair=(W1, PS0),
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="link-reset-briefly",
        group="network",
        story="the same for a second: the link opens again, and nothing is reported",
        around=Surroundings(cut=(W1, PS1, "reset"), heals_after=_BRIEF),
        servers=2,
        kind=None,
        steps=_STEPS,
    ),
    # -- a whole host is paused --
    Drill(
        name="host-paused",
        group="lost task",
        story="the host of a worker is paused, its monitor too, and resumes: both addresses accept and say nothing",
        around=Surroundings(paused=W1),
        cause=Cause.FROZEN,
        pair=(W1,),
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="server-host-paused",
        group="lost task",
        story="the same with the only server, which is also the coordinator",
        around=Surroundings(paused=PS0),
        cause=Cause.FROZEN,
        pair=(PS0,),
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="host-paused-briefly",
        group="lost task",
        story="the host of a worker is paused for a second: nothing is reported",
        around=Surroundings(paused=W1, heals_after=_BRIEF),
        kind=None,
        steps=_STEPS,
    ),
    # -- one direction of a link is cut: one answer for each direction --
    Drill(
        name="link-one-way-back",
        group="network",
        story="packets from one server to a worker are dropped; the other direction works",
        around=Surroundings(cut=(PS1, W1, "from")),
        servers=2,
        cause=Cause.ONE_WAY_LINK,
        pair=(PS1, W1),
        one_answer=True,
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="one-way-to-coordinator",
        group="network",
        story="packets from a worker to the only server are dropped; the other worker reaches both",
        around=Surroundings(cut=(W1, PS0, "from")),
        cause=Cause.ONE_WAY_LINK,
        pair=(W1, PS0),
        one_answer=True,
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="one-way-from-coordinator",
        group="network",
        story="packets from the only server to a worker are dropped; the other worker reaches both",
        around=Surroundings(cut=(PS0, W1, "from")),
        cause=Cause.ONE_WAY_LINK,
        pair=(PS0, W1),
        one_answer=True,
        goes_on=True,
        fooled=True,
        steps=_STEPS,
    ),
    Drill(
        name="one-way-briefly",
        group="network",
        story="packets from a worker to the only server are dropped for a second: nothing is reported",
        around=Surroundings(cut=(W1, PS0, "from"), heals_after=_BRIEF),
        kind=None,
        steps=_STEPS,
    ),
    # -- large packets vanish --
    Drill(
        name="large-packets-lost",
        group="network",
        story="packets above a size vanish between the only server and a worker; heartbeats pass",
        around=Surroundings(cut=(PS0, W1, "large")),
        cause=Cause.LINK_DOWN,
        pair=(PS0, W1),
        one_answer=True,
        fooled=True,
        elements=400_000,
        bucket_bytes=1 << 20,
    ),
    Drill(
        name="large-packets-lost-back",
        group="network",
        story="the same in the other direction, where not even the worker's snapshot reaches the server",
        around=Surroundings(cut=(W1, PS0, "large")),
        cause=Cause.LINK_DOWN,
        pair=(W1, PS0),
        one_answer=True,
        fooled=True,
        elements=400_000,
        bucket_bytes=1 << 20,
    ),
    Drill(
        name="large-packets-lost-briefly",
        group="network",
        story="the same for a second: what was lost is sent again, and nothing is reported",
        around=Surroundings(cut=(PS0, W1, "large"), heals_after=_BRIEF),
        kind=None,
        steps=_STEPS,
        elements=400_000,
        bucket_bytes=1 << 20,
    ),
)
