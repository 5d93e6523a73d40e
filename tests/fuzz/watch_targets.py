"""What ranks of a watched job, py-spy and the watchers of other hosts say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from fuzz.engine import Target
from lockstep.flight.merging import merged_dumps
from lockstep.flight.reading import DumpError, read_dump
from lockstep.flight.recording import StackLine
from lockstep.foreign import JsonError, read_json
from lockstep.runtime.watch.kernel_tcp import Counted
from lockstep.watch import injected
from lockstep.watch.asking import ListedWatch, read_entry
from lockstep.watch.ranks import NamedBucket, RankFacts, RankStatus, read_facts, read_status
from lockstep.watch.sight_codec import SightsError, sights_from_json, sights_to_json
from lockstep.watch.sights import Helper, RankSight, Vitality
from lockstep.watch.stack_reading import main_stack, work_of

FACTS = {"rank": 1, "world": 3, "local": 3, "groups": {"0": [0, 1, 2]}, "buckets": [{"elements": 4, "names": ["w"]}]}
CALL = {"record_id": 3, "collective_seq_id": 4, "profiling_name": "gloo:all_reduce", "time_created_ns": 5}
RECORDED = json.dumps({"version": "2.10", "pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": [CALL]}).encode()
STACK = [{"os_thread_id": 7, "frames": [{"name": "f", "filename": "/a/b.py", "line": 3}]}]
SIGHT = RankSight(
    rank=1,
    host="node",
    pid=7,
    life=Vitality.RUNS,
    status=RankStatus(3, 1.5, 2.5, 0, ("a",), ("b",)),
    facts=RankFacts(world=3, groups={"0": (0, 1)}, buckets=(NamedBucket(4, ("w",)),)),
    stack=(StackLine("f", "/a/b.py", 3),),
    helpers=(Helper(8, False, False, 0.5),),
    links={"10.0.0.1": Counted(1, 2, 3)},
    dump=b'{"version": "2.10", "pg_config": {}, "entries": []}',
)


def watch_targets() -> Iterator[Target]:
    status = bytearray(injected.STATUS_BYTES)
    injected.STATUS.pack_into(status, 0, injected.MARK, 7, 1.0, 2.0, 0, 3)
    yield Target("watch: status of a rank", _status, [bytes(status)], ())
    yield Target("watch: facts of a rank", read_facts, [json.dumps(FACTS).encode()], (JsonError,))
    yield Target("watch: stacks", _stacks, [json.dumps(STACK).encode()], (JsonError,))
    listed = ListedWatch("7", "/tmp/x/why.sock", "torchrun train.py", "/home/x", 1.0)
    yield Target("watch: entry of a job", read_entry, [json.dumps(asdict(listed)).encode()], ())
    yield Target("watch: two recorders", _merged, [RECORDED], (DumpError,))
    seeds = [sights_to_json({1: SIGHT})]
    yield Target("watch: another host", lambda data: sights_from_json(data, 1.0), seeds, (SightsError,))


def _merged(data: bytes) -> None:
    for one in ((data, RECORDED), (RECORDED, data), (data, data)):
        read_dump(merged_dumps(*one), 0)


def _status(data: bytes) -> None:
    read_status(data.ljust(injected.STATUS_BYTES, b"\0"))


def _stacks(data: bytes) -> None:
    work_of(main_stack(read_json(data), 7))
