"""Parsers of what was stored for later: shards, states of workers and programs, keys, certificates, lists of jobs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from fuzz.engine import Target
from lockstep.errors import BadInput
from lockstep.library.call_values import packed as packed_value
from lockstep.library.call_values import unpacked as unpacked_value
from lockstep.library.errors import UsageError
from lockstep.library.program_state import LoopPosition, ProgramState
from lockstep.library.state_codec import from_text, to_text
from lockstep.protocol.core.messages import Layout, OptimizerEntry, ParameterEntry
from lockstep.protocol.core.plan import make_plan
from lockstep.runtime import running_jobs
from lockstep.runtime.checkpoint.folder import MANIFEST, CheckpointError, Manifest
from lockstep.runtime.checkpoint.tensor_file import FileFacts, write_tensors
from lockstep.security import certificates
from lockstep.security.key import Key, find_key
from lockstep.security.signing import lockstep_version, sign
from lockstep.training.export import export
from lockstep.training.ranks.kept_versions import NOW, SIZES, KeptVersions, question, read_sizes, read_stream
from lockstep.training.ranks.saving import NoSuchState, optimizers_as, optimizers_in
from lockstep.training.server.named_optimizer import make_optimizer
from lockstep.training.server.shard_file import ShardFiles
from lockstep.training.server.shard_store import GET_STATE, PUT_STATE, STATE_HEADER, TorchShardStore
from lockstep.training.worker.local_state import StateDoesNotFitError, WorkerState
from lockstep.training.worker.loss_scale import LossScale
from lockstep.version import __version__

_ENTRIES = (ParameterEntry("w", 24, "float32", 0), ParameterEntry("b", 7, "float32", 0))
_SHARD, _STATE = "server-0.safetensors", "worker-0.safetensors"


def state_targets(folder: Path) -> Iterator[Target]:
    yield from _states()
    yield from _kept()
    yield from _checkpoints(folder)
    yield from _keys(folder)
    entry = {"task": "worker 0", "cluster": {"worker 0": "a:1"}, "folder": "/", "started": 1.5}
    yield Target("list of running jobs", running_jobs._read, [json.dumps(entry).encode()])


def _kept() -> Iterator[Target]:
    """What a rank that comes back asks of another, and what it gets."""
    ranks = KeptVersions([nn.Parameter(torch.ones(3, 2))], 0, lambda: ("[]", {}), lambda _version: torch.zeros(4))
    ranks.open(3)
    yield Target("what a rank keeps: question", partial(ranks.answer, NOW), [question(3, 0)], (ValueError,))
    sizes = ranks.answer(NOW, question(3, SIZES))
    yield Target("what a rank keeps: sizes", read_sizes, [sizes], (ValueError,))
    header = read_sizes(sizes)[0]
    stream = ranks.answer(NOW, question(3, 0))
    yield Target(
        "what a rank keeps: stream", lambda data: read_stream(bytearray(data), header), [stream], (ValueError,)
    )


def _store() -> TorchShardStore:
    plan = make_plan(_ENTRIES, 1, 256)
    store = TorchShardStore()
    room = plan.shard_room(0)
    optimizer = OptimizerEntry("Adam", '{"lr": 0.1}')
    layout = Layout(plan.hash, 256, _ENTRIES, (optimizer,))
    store.prepare(layout, plan, 0, [memoryview(bytearray(room)), memoryview(bytearray(room))])
    return store


def _states() -> Iterator[Target]:
    store = _store()
    kept = {f"{piece}/{name}": torch.zeros(size) for piece, size in ((0, 7), (1, 24)) for name in ("exp_avg", "max")}
    packed = save({**kept, "0/step": torch.tensor(3.0), "1/step": torch.tensor(3.0)})
    put = STATE_HEADER.pack(0, 0, len(packed)) + packed

    def ask(data: bytes) -> None:
        store.answer(PUT_STATE, data)
        store.answer(GET_STATE, data)

    yield Target("optimizer state: question", ask, [put, STATE_HEADER.pack(0, 0, 0)], (ValueError,))
    options = [json.dumps(one).encode() for one in ({"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.1, "momentum": 0.9})]
    parameter = nn.Parameter(torch.zeros(4), requires_grad=False)

    def make(data: bytes) -> None:
        for kind in ("SGD", "Adam"):
            make_optimizer(OptimizerEntry(kind, data.decode(errors="replace")), parameter)

    yield Target("optimizer: options", make, options, (ValueError,))
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    worker = WorkerState([model], [torch.device("cpu")], LossScale())
    yield Target("state of a worker", worker.put, [worker.take()], (StateDoesNotFitError,))
    program = ProgramState([model], [], [], describes=False)
    yield Target("state of a program", program.put, [program.take(LoopPosition(3, 1, 2, True))], (UsageError,))
    tensors: dict[str, torch.Tensor] = {}
    texts = [
        to_text(value, tensors).encode()
        for value in ({"a": [1, (2, 3.5)], "t": torch.ones(2)}, {1: None, "b": {"c": True}}, float("inf"))
    ]
    yield Target("state of kept objects", lambda data: from_text(data.decode(errors="replace"), tensors), texts,
                 (ValueError,))  # fmt: skip
    brought = [packed_value(value) for value in ({"a": [1, None]}, torch.ones(2, 3), ("b", torch.tensor(True)))]
    yield Target("value of a call", unpacked_value, brought, (ValueError,))


def _facts(path: Path) -> FileFacts:
    return FileFacts(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def _checkpoints(folder: Path) -> Iterator[Target]:
    place = folder / "exported"
    place.mkdir()
    write_tensors(place / _SHARD, _store().snapshot(0), {})
    shard = (place / _SHARD).read_bytes()
    described = {"parameters": [["w", [4, 6]], ["b", [7]]], "buffers": [["mean", [2], "float32", True]]}
    state = save({"buffers/float32": torch.zeros(2)}, {"model": json.dumps(described)})

    def write(name: str, data: bytes) -> None:
        """With the right checksums: a wrong one is refused before anything is parsed."""
        (place / _SHARD).write_bytes(data if name == _SHARD else shard)
        (place / _STATE).write_bytes(data if name == _STATE else state)
        manifest = Manifest(
            version=7, job="ab", program="bench", written=1.5e9, servers=1, workers=1, bucket_bytes=256,
            plan_hash=make_plan(_ENTRIES, 1, 256).hash, parameters=_ENTRIES, optimizers=(OptimizerEntry("Adam", "{}"),),
            settings={}, shards=(_facts(place / _SHARD),), states=(_facts(place / _STATE),),
        )  # fmt: skip
        text = json.dumps(manifest.to_json()).encode()
        (place / MANIFEST).write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
        export(place, folder / "out.safetensors")

    yield Target("checkpoint: shard, exported", lambda data: write(_SHARD, data), [shard], (CheckpointError,))
    yield Target("checkpoint: state, exported", lambda data: write(_STATE, data), [state], (CheckpointError,))

    def read(data: bytes) -> None:
        (place / _SHARD).write_bytes(data)
        files = ShardFiles(place, [_SHARD])
        files.value("w", 0, 24, torch.float32)
        files.state("w", 0, 24)

    yield Target("checkpoint: shard", read, [shard], (ValueError,))
    write_tensors(place / _SHARD, optimizers_as("[1, 2]", {"0": torch.ones(3)}), {})
    optimizers = (place / _SHARD).read_bytes()

    def read_optimizers(data: bytes) -> None:
        (place / _SHARD).write_bytes(data)
        optimizers_in(place, [_SHARD])

    yield Target("checkpoint: optimizers of ranks", read_optimizers, [optimizers], (NoSuchState,))


def _keys(folder: Path) -> Iterator[Target]:
    path = folder / "key"
    path.touch(0o600)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        find_key(path)

    yield Target("key file", read, [b"ab" * 32, b"ab" * 32 + b"\n"], (BadInput,))
    key = Key(bytes(32), path)
    authority, certificate, private = sign(key, certificates.NAME, 4e9)
    fields = dict(zip(("authority", "certificate", "private"), (authority, certificate, private), strict=True))
    stored = {"version": __version__, "expires": 4e9, **{n: one.decode() for n, one in fields.items()}}

    def find(data: bytes) -> None:
        # With the right proof: a wrong one is refused before anything is parsed.
        place = certificates._place(key)
        place.touch(0o600)
        place.write_bytes(certificates._proof(key, data) + b"\n" + data)
        certificates._stored(key)

    yield Target("stored certificates", find, [json.dumps(stored).encode()])
    der = b"".join(certificate.strip().splitlines()[1:-1])
    yield Target("certificate of another program", lockstep_version, [base64.b64decode(der)])
