"""What one watcher sees of its ranks, as JSON for the watcher of rank 0; read back by type, whoever has written it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Final

from lockstep.flight.recording import StackLine
from lockstep.foreign import plain, read_json
from lockstep.runtime.watch.kernel_tcp import Counted
from lockstep.watch.ranks import NamedBucket, RankFacts, RankStatus, recording_of
from lockstep.watch.sights import Helper, RankSight, Vitality, Work

MAX_BYTES: Final = 256 << 20
"""All ranks of a host, with the dumps of their recorders."""
_MAX_VALUES: Final = 1 << 22
_PLAIN: Final = ("rank", "host", "pid", "state", "exit_code", "ended", "entered", "busy", "runnable", "on_device")


class SightsError(ValueError):
    """This is not what a watcher says of its ranks."""


def sights_to_json(sights: Mapping[int, RankSight]) -> bytes:
    return json.dumps([_fields(one) for one in sights.values()]).encode()


def _fields(one: RankSight) -> dict[str, Any]:
    return {
        **{name: getattr(one, name) for name in _PLAIN},
        "life": one.life.value,
        "work": one.work.value,
        "status": dataclasses.astuple(one.status),
        "facts": dataclasses.asdict(one.facts),
        "stack": [dataclasses.astuple(line) for line in one.stack],
        "helpers": [dataclasses.astuple(helper) for helper in one.helpers],
        "links": {address: dataclasses.astuple(counted) for address, counted in one.links.items()},
        "dump": one.dump.decode(errors="replace"),
    }


def sights_from_json(data: bytes, now: float) -> dict[int, RankSight]:
    """``SightsError`` if it is something else."""
    try:
        found: Any = read_json(data, MAX_BYTES, values=_MAX_VALUES)
        return {one.rank: one for one in (_sight(fields, now) for fields in found)}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise SightsError(plain(str(error), 200)) from error


def _sight(fields: Any, now: float) -> RankSight:
    facts = _facts(fields["facts"])
    rank, dump = int(fields["rank"]), str(fields["dump"]).encode()
    code = fields["exit_code"]
    step, stepped, beat, leaving, gathered, reduced = fields["status"]
    return RankSight(
        rank=rank,
        host=plain(str(fields["host"]), 300),
        pid=int(fields["pid"]),
        life=Vitality(fields["life"]),
        state=plain(str(fields["state"]), 100),
        exit_code=None if code is None else int(code),
        ended=float(fields["ended"]),
        status=RankStatus(int(step), float(stepped), float(beat), int(leaving), _texts(gathered), _texts(reduced)),
        facts=facts,
        entered=bool(fields["entered"]),
        busy=float(fields["busy"]),
        runnable=bool(fields["runnable"]),
        stack=tuple(StackLine(plain(str(a), 200), plain(str(b), 500), int(c)) for a, b, c in fields["stack"]),
        work=Work(fields["work"]),
        on_device=bool(fields["on_device"]),
        helpers=tuple(Helper(int(a), bool(b), bool(c), float(d)) for a, b, c, d in fields["helpers"]),
        links={plain(str(to), 100): Counted(*(int(one) for one in own)) for to, own in fields["links"].items()},
        dump=dump,
        recording=recording_of(dump, rank, now, facts) if dump else None,
    )


def _facts(fields: Any) -> RankFacts:
    return RankFacts(
        world=int(fields["world"]),
        local=int(fields["local"]),
        groups={plain(str(name)): tuple(int(one) for one in ranks) for name, ranks in fields["groups"].items()},
        buckets=tuple(NamedBucket(int(one["elements"]), _texts(one["names"])) for one in fields["buckets"]),
        error=plain(str(fields["error"]), 2000),
        place=plain(str(fields["place"]), 500),
        raised=float(fields["raised"]),
        master=plain(str(fields["master"]), 300),
        port=int(fields["port"]),
    )


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(plain(str(one), 300) for one in values)
