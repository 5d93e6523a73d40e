"""Dumps as other versions of torch write them, made by hand from what their sources say: never written by that torch.

2.3 and 2.4 have the least, 2.7 has the version of NCCL, 2.10 threads and a library's version. Formats between these
are left out: no source of them was at hand.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

from lockstep.flight.recording import CallState, RecordedCall, Recording, Tensors

VERSIONS = ("2.3", "2.4", "2.7", "2.10")
_WITH_THREADS = ("2.10",)


def as_pickle(recording: Recording, version: str) -> bytes:
    return pickle.dumps(fields(recording, version, as_json=False), protocol=2)


def as_json(recording: Recording, version: str) -> bytes:
    return json.dumps(fields(recording, version, as_json=True)).encode()


def fields(recording: Recording, version: str, *, as_json: bool) -> dict[str, Any]:
    number: Any = str if as_json else int
    library = {"2.7": "nccl_version", "2.10": "comm_lib_version"}.get(version)
    groups = {name: list(ranks) for name, ranks in recording.members.items()} or {"": []}
    return {
        "version": version,
        **({library: "2.21.5"} if library else {}),
        "pg_config": {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()},
        "pg_status": {
            "0": {
                "last_enqueued_collective": number(1),
                "last_started_collective": number(-1),
                "last_completed_collective": number(1),
            }
        },
        "entries": [_entry(call, version, as_json=as_json) for call in recording.calls],
    }


def _entry(call: RecordedCall, version: str, *, as_json: bool) -> dict[str, Any]:
    unknown = 0 if as_json else None
    at = int(call.created * 1e9)
    pair = [call.group, call.description]
    arrow = f" {call.source}->{call.target}" if call.source >= 0 else ""
    threads = {"thread_id": "1", "thread_name": "python"} if version in _WITH_THREADS else {}
    stack = [{"name": one.function, "filename": one.file, "line": one.line} for one in call.stack]
    return {
        **({} if as_json else {"frames": stack}),
        **threads,
        "record_id": call.record,
        "pg_id": 0,
        "process_group": pair if as_json else tuple(pair),
        "collective_seq_id": call.number,
        "p2p_seq_id": call.p2p_number,
        "op_id": call.record + 1,
        "profiling_name": f"{call.backend}:{call.operation}{arrow}",
        "time_created_ns": at,
        **_tensors("input", call.inputs),
        **_tensors("output", call.outputs),
        "state": call.state.value,
        "time_discovered_started_ns": unknown,
        "time_discovered_completed_ns": at if call.state is CallState.COMPLETED else unknown,
        "retired": call.retired,
        "timeout_ms": int(call.timeout * 1000),
        "is_p2p": call.p2p,
    }


def _tensors(which: str, tensors: Tensors) -> dict[str, Any]:
    return {f"{which}_sizes": [list(size) for size in tensors.sizes], f"{which}_dtypes": list(tensors.dtypes)}
