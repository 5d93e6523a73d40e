"""Parsers of files: what a run leaves behind, checkpoints, traces, data sets."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError

from diagnose.faulty import frozen
from fuzz.engine import Target
from fuzz.state_targets import state_targets
from fuzz.watch_targets import watch_targets
from helpers.snapshots import healthy
from lockstep.benchmark.data.cifar import read_batch
from lockstep.benchmark.data.errors import BadData, BadRecord
from lockstep.benchmark.data.example import PictureExample, decode_example, encode_example
from lockstep.benchmark.data.records import framed, index_records, read_payload
from lockstep.benchmark.data.scenes import SCENES, draw
from lockstep.benchmark.data.transforms import Engine, Preparation, make_engine, prepare
from lockstep.diagnose.analyse import analyse
from lockstep.diagnose.files import evidence_of, read_folder
from lockstep.diagnose.text import render
from lockstep.errors import BadInput
from lockstep.flight.analysis import account_of
from lockstep.flight.diagnosis import diagnosis_of
from lockstep.flight.dump_folder import read_dump_folder
from lockstep.flight.reading import DumpError, read_dump
from lockstep.protocol.core.messages import OptimizerEntry, ParameterEntry
from lockstep.runtime.checkpoint.folder import MANIFEST, CheckpointError, Manifest, read_manifest
from lockstep.runtime.checkpoint.tensor_file import FileFacts
from lockstep.runtime.monitor.metrics_keeper import MetricsKeeper
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport, decode_report, encode_report
from lockstep.runtime.trace.merge import merged, read_trace
from lockstep.runtime.trace.page import trace_page
from lockstep.runtime.trace.step_tally import BOUNDS
from lockstep.training.server.optimizer_state import unpack

SIDE = 32
FLIGHT_DATA = Path(__file__).parents[1] / "flight" / "data"


def file_targets(stack: contextlib.ExitStack) -> Iterator[Target]:
    """``stack`` removes the folder in which the files are written."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lockstep-fuzz-")))
    yield _manifest(folder)
    yield from _traces(folder)
    yield _run_folder(folder)
    yield from _flight_dumps(folder)
    yield from watch_targets()
    yield Target("monitor: report of its task", decode_report, [_report()])
    yield Target("monitor: metrics of its task", _page_of, [_metrics()])
    yield Target("optimizer state", lambda data: unpack(data, 2), [_state()], (ValueError, SafetensorError))
    yield _gpu_twin()
    yield from state_targets(folder)
    yield from _records(folder)
    yield from _pictures()


def _metrics() -> bytes:
    """One of every field."""
    told = {"counts": [0] * (len(BOUNDS) + 1), "seconds": 0.5}
    verdict = {"kind": "verdict", "cause": "dead", "culprit": "a", "peer": "b", "holds": True}
    named = {"incarnation": "0a", "verdict": verdict, "verdicts": {"dead": 1}, "down": ["a"]}
    steps = {"step": 7, "started_at": 0, "counted": 3, "productive": 1.5, "last_step": 1e9, "examples": 4}
    waits = {"waited": {"a": 1.0}, "waited_in_all": 1.0, "waits": {"a": 2.0}}
    links = {"links": [["grpc", "up", 2]], "bytes": [["grpc", 1, 2]], "rejoins": 1, "checkpoint": 1e9, "refused": 0}
    homes = {"replica": False}
    histograms = {"bounds": list(BOUNDS), "steps": told, "parts": {"computing": told}}
    return json.dumps({**named, **steps, **waits, **links, **homes, **histograms}).encode()


def _page_of(data: bytes) -> None:
    record = TaskRecord("/job:worker/replica:0/task:0", "0", os.getpid())
    record.on_started(os.getpid())
    record.on_report(TaskReport(task_address="127.0.0.1:1"))
    MetricsKeeper(record, "", lambda _, __: data).text()


def _report() -> bytes:
    return encode_report(TaskReport("training", "127.0.0.1:1", 1, 2, exit_code=3, reason="a reason"))


def _gpu_twin() -> Target:
    """In memory that a peer has lent."""
    from helpers.fake_gpu import FakeGpu, FakeGpuMemory
    from lockstep.training.gpu.gpu_twins import TWIN_BYTES, OpenedTwins, TwinTable

    gpu = FakeGpu()
    owner = FakeGpuMemory(gpu, process=2)
    table = bytearray(TWIN_BYTES)
    handle = owner.handle_of(owner.allocate(1024))
    TwinTable(owner.gpu, owner.process, 0, 2, 512, 512, 1024, handle).write(memoryview(table), 0)

    def open_twin(data: bytes) -> None:
        twins = OpenedTwins(FakeGpuMemory(gpu))
        found, _ = twins.open(memoryview(data), 0, 512)
        if found.twin is not None:
            assert found.twin.tensor.numel() >= 512
            found.twin.has_opened(0)
        twins.all_have_opened(0)

    return Target("twin of a region", open_twin, [bytes(table)])


def _state() -> bytes:
    import torch

    from lockstep.training.server.optimizer_state import pack

    return pack([{"exp_avg": torch.zeros(4)}, {"exp_avg": torch.ones(3)}])


def _manifest(folder: Path) -> Target:
    manifest = Manifest(
        version=7, job="ab", program="bench", written=1.5e9, servers=1, workers=1, bucket_bytes=1024, plan_hash="cd",
        parameters=(ParameterEntry("w", 4, "float32", 0),), optimizers=(OptimizerEntry("sgd", '{"lr": 0.1}'),),
        settings={"a": "b"}, shards=(FileFacts("server-0.safetensors", 3, "ef"),),
        states=(FileFacts("worker-0.safetensors", 3, "01"),),
    )  # fmt: skip
    (folder / "checkpoint").mkdir()

    def read(data: bytes) -> None:
        # With the right checksum: a wrong one is refused before anything is parsed.
        (folder / "checkpoint" / MANIFEST).write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        read_manifest(folder / "checkpoint")

    return Target("checkpoint: manifest", read, [json.dumps(manifest.to_json()).encode()], (CheckpointError,))


def _traces(folder: Path) -> Iterator[Target]:
    def trace(task: str, peer: str, happening: str, at: int) -> bytes:
        seen = {"peer": peer, "number": 1, "bucket": 0, "seen": {happening: at}}
        events = [
            {"name": "step", "ph": "X", "ts": at, "dur": 10, "pid": 1, "tid": 1, "args": {}},
            {"name": "g", "cat": "transfer", "ph": "b", "id": "1", "ts": at, "pid": 1, "tid": 2, "args": seen},
            {"name": "g", "cat": "transfer", "ph": "e", "id": "1", "ts": at + 5, "pid": 1, "tid": 2},
            {"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": task}},
        ]
        return json.dumps({"traceEvents": events, "lockstep": {"task": task, "wall_offset": 1.5}}).encode()

    first = trace("worker 0", "ps 0", "in flight", 1000)
    (folder / "whole.json").write_bytes(first)

    def merge(data: bytes) -> None:
        (folder / "mutated.json").write_bytes(data)
        result = merged([read_trace(folder / "whole.json"), read_trace(folder / "mutated.json")])
        trace_page(result)
        json.dumps(result)

    yield Target("trace merge", merge, [trace("ps 0", "worker 0", "arrived", 1200), first], (BadInput,))


def _run_folder(folder: Path) -> Target:
    place = folder / "run"
    place.mkdir()
    snapshots = [json.dumps(fields).encode() for fields in healthy().tasks.values()]
    (place / "whole.snapshot.json").write_bytes(snapshots[0])

    def read(data: bytes) -> None:
        (place / "mutated.snapshot.json").write_bytes(data)
        (place / "report.json").write_bytes(data)
        analyse(evidence_of(read_folder(place))).to_json()

    return Target("run folder", read, [*snapshots, analyse(frozen().evidence()).to_json()])


def _flight_dumps(folder: Path) -> Iterator[Target]:
    seeds = [file.read_bytes() for file in sorted(FLIGHT_DATA.glob("*/*"))]
    other = read_dump(seeds[0], 0)

    def read(data: bytes) -> None:
        recordings = {0: other, 1: read_dump(data, 1)}
        render("why", diagnosis_of(account_of(recordings)))

    yield Target("flight recorder: dump", read, seeds, (DumpError,))
    place = folder / "dumps"
    place.mkdir()
    (place / "trace_rank_0").write_bytes(seeds[0])

    def read_all(data: bytes) -> None:
        (place / "trace_rank_1").write_bytes(data)
        diagnosis_of(account_of(read_dump_folder(place).recordings)).to_json()

    yield Target("flight recorder: folder", read_all, seeds)


def _records(folder: Path) -> Iterator[Target]:
    example = encode_example(PictureExample(_jpeg(), 3, "cat", ((0.1, 0.1, 0.5, 0.5),)))
    path = folder / "train-00000-of-00001"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        spans = index_records(path)
        with path.open("rb") as file:
            for span in spans:
                decode_example(read_payload(file.fileno(), span))

    yield Target("TFRecord: file", read, [framed(example) * 2, framed(b"")], (BadData, BadRecord))
    yield Target("TFRecord: example", decode_example, [example], (BadRecord,))
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"labels": [1, 2], b"filenames": [b"a", b"b"]}
    cifar = folder / "data_batch_1"

    def read_cifar(data: bytes) -> None:
        cifar.write_bytes(data)
        read_batch(cifar)

    seeds = [pickle.dumps(batch, protocol=protocol) for protocol in (0, 2, 4)]
    yield Target("CIFAR-10: batch", read_cifar, seeds, (BadData,))


def _jpeg(kind: str = "JPEG", mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    draw(SCENES[0], 0).resize((90, 70)).convert(mode).save(out, kind)
    return out.getvalue()


def _pictures() -> Iterator[Target]:
    seeds = [_jpeg(), _jpeg(mode="L"), _jpeg(mode="CMYK"), _jpeg("PNG"), _jpeg("PNG", "P")]
    target = np.zeros((SIDE, SIDE, 3), np.uint8)
    for name in ("turbo", "pillow"):
        engine = make_engine(name)

        def read(data: bytes, engine: Engine = engine) -> None:
            prepare(data, (), Preparation(SIDE), engine, random.Random(1), target)

        yield Target(f"image, {name}", read, seeds, (BadRecord,))
