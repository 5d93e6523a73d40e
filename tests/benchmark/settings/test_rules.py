"""What can be wrong with a run: one test per rule."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest

from lockstep.benchmark.settings.config import (
    BenchConfig,
    DeviceConfig,
    ExchangeConfig,
    LocalCluster,
    OptimizerConfig,
    OutputConfig,
    RunLength,
)
from lockstep.benchmark.settings.rules import RULES, problems
from lockstep.protocol.core.ids import server, worker
from lockstep.runtime.startup.cluster import ClusterSpec

SPEC = ClusterSpec(ps_hosts=("a:1",), worker_hosts=("b:1",), task=worker(0))


def _run(**values: Any) -> BenchConfig:
    return BenchConfig(run=RunLength(**values))


def _optimizer(name: str, value: float) -> BenchConfig:
    values: dict[str, Any] = {name: value}
    return BenchConfig(optimizer=OptimizerConfig(**values))


def _local(servers: int, workers: int) -> BenchConfig:
    return BenchConfig(cluster=ClusterSpec(), local=LocalCluster(servers=servers, workers=workers))


def _replicated(servers: int, *, on_worker_loss: str = "wait", **exchange: Any) -> BenchConfig:
    made = ExchangeConfig(**{"local_parameter_device": "cpu", **exchange})
    local = LocalCluster(servers=servers, workers=2)
    cluster = ClusterSpec(server_replicas=1, on_worker_loss=on_worker_loss)
    return BenchConfig(cluster=cluster, local=local, exchange=made)


REPLICATED = ExchangeConfig(variable_update="distributed_replicated")

BROKEN: dict[str, tuple[str, BenchConfig, str]] = {
    "cluster": ("cluster", BenchConfig(cluster=SPEC.for_task(worker(1))), "--task_index=1 is out of range"),
    "task and local": (
        "local cluster",
        BenchConfig(cluster=SPEC, local=LocalCluster(servers=1, workers=1)),
        "leave one of the two out",
    ),
    "no server": ("local cluster", _local(0, 2), "at least one server and one worker"),
    "no worker": ("local cluster", _local(1, 0), "at least one server and one worker"),
    "too many": ("local cluster", _local(1, 64), "would start 65 tasks here"),
    "no second server": ("server replicas", _replicated(1), "give --ps=2"),
    "replicas without steps": ("server replicas", _replicated(2, cross_replica_sync=False), "steps that all workers"),
    "replicas without a worker": ("server replicas", _replicated(2, on_worker_loss="shrink"), "=wait or abort"),
    "replicas on GPUs": ("server replicas", _replicated(2, local_parameter_device="gpu"), "same kind of device"),
    "model": ("model", BenchConfig(model="resnet49"), "did you mean resnet50"),
    "refused model": ("model", BenchConfig(model="ssd300"), "needs the COCO data set"),
    "data set": ("model", BenchConfig(data_name="mnist"), "--data_name=mnist is not known"),
    "model of another data set": ("model", BenchConfig(model="resnet20"), "it exists only for cifar10"),
    "batch size": ("batch size", _run(batch_size=-1), "--batch_size=-1 is negative"),
    "batches": ("run length", _run(num_batches=0), "--num_batches=0 leaves nothing to time"),
    "warm-up": ("run length", _run(num_warmup_batches=-1), "--num_warmup_batches=-1 is negative"),
    "mode": (
        "variable update",
        BenchConfig(exchange=ExchangeConfig(variable_update="magic")),
        "--variable_update=magic is not known",
    ),
    "replicated alone": ("variable update", BenchConfig(exchange=REPLICATED), "needs servers"),
    "replicated and asynchronous": (
        "variable update",
        BenchConfig(cluster=SPEC, exchange=dataclasses.replace(REPLICATED, cross_replica_sync=False)),
        "is always synchronous",
    ),
    "no bucket": ("bucket size", BenchConfig(exchange=ExchangeConfig(bucket_bytes=0)), "--bucket_mb=0 is out of range"),
    "huge bucket": (
        "bucket size",
        BenchConfig(exchange=ExchangeConfig(bucket_bytes=2 << 30)),
        "--bucket_mb=2048 is out of range",
    ),
    "no GPU": ("GPUs", BenchConfig(devices=DeviceConfig(num_gpus=0)), "--num_gpus=0 leaves no device"),
    "too many devices": ("GPUs", BenchConfig(devices=DeviceConfig(num_gpus=65)), "give at most 64"),
    "device": ("devices", BenchConfig(devices=DeviceConfig(device="tpu")), "--device=tpu is not known"),
    "data format": (
        "devices",
        BenchConfig(devices=DeviceConfig(data_format="WHCN")),
        "--data_format=WHCN is not known",
    ),
    "threads": ("devices", BenchConfig(devices=DeviceConfig(num_threads=0)), "--num_threads=0 leaves no thread"),
    "optimizer": ("optimizer", BenchConfig(optimizer=OptimizerConfig(name="lbfgs")), "--optimizer=lbfgs is not known"),
    "rate": ("optimizer", _optimizer("init_learning_rate", -1), "--init_learning_rate=-1 is negative"),
    "decay": ("optimizer", _optimizer("weight_decay", -1), "--weight_decay=-1 is negative"),
    "momentum": ("optimizer", _optimizer("momentum", 1), "--momentum=1 is out of range"),
    "rmsprop decay": ("optimizer", _optimizer("rmsprop_decay", -0.5), "--rmsprop_decay=-0.5 is out of range"),
    "rmsprop momentum": ("optimizer", _optimizer("rmsprop_momentum", 2), "--rmsprop_momentum=2 is out of range"),
    "beta 1": ("optimizer", _optimizer("adam_beta1", 1), "--adam_beta1=1 is out of range"),
    "beta 2": ("optimizer", _optimizer("adam_beta2", 1), "--adam_beta2=1 is out of range"),
    "rmsprop epsilon": ("optimizer", _optimizer("rmsprop_epsilon", 0), "--rmsprop_epsilon=0 would divide by zero"),
    "adam epsilon": ("optimizer", _optimizer("adam_epsilon", 0), "--adam_epsilon=0 would divide by zero"),
    "lines": (
        "output",
        BenchConfig(output=OutputConfig(display_every=0)),
        "--display_every=0 is not a number of steps",
    ),
    "average": (
        "output",
        BenchConfig(output=OutputConfig(display_perf_ewma=1.5)),
        "--display_perf_ewma=1.5 is out of range",
    ),
    "negative seed": ("seed", BenchConfig(seed=-1), "--seed=-1 is out of range"),
    "large seed": ("seed", BenchConfig(seed=1 << 63), "is out of range"),
}


@pytest.mark.parametrize(("rule", "config", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_rule_gives_one_sentence_with_a_remedy(rule: str, config: BenchConfig, sentence: str) -> None:
    (problem,) = problems(config)
    assert problem.rule == rule
    assert sentence in problem.sentence
    assert problem.sentence.endswith((".", "?"))


def test_a_model_in_a_module_that_cannot_be_looked_up_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the program itself: a module without a description of where it came from."""
    monkeypatch.setitem(sys.modules, "without_origin", ModuleType("without_origin"))
    (problem,) = problems(BenchConfig(model="without_origin:net"))
    assert problem.sentence.startswith("--model=without_origin:net names a package that cannot be found;")


def test_every_rule_is_broken_by_one_of_the_cases() -> None:
    assert {rule for rule, _config, _sentence in BROKEN.values()} == set(RULES)


@pytest.mark.parametrize(
    "config",
    [BenchConfig(), _local(1, 2), BenchConfig(cluster=SPEC), BenchConfig(cluster=SPEC, exchange=REPLICATED)],
)
def test_a_right_run_breaks_no_rule(config: BenchConfig) -> None:
    assert problems(config) == []


def test_all_broken_rules_are_reported_at_once() -> None:
    assert len(problems(BenchConfig(model="x", seed=-1, run=RunLength(batch_size=-1, num_batches=0)))) == 4


def test_more_gpus_than_the_machine_shows_are_refused_on_workers_only() -> None:
    devices = DeviceConfig(num_gpus=8, device="gpu")
    for config in (BenchConfig(devices=devices), BenchConfig(devices=devices, cluster=SPEC)):
        (problem,) = problems(config, gpus=2)
        assert "more GPUs than the 2 that this machine shows" in problem.sentence
        assert "give at most --num_gpus=2, or --device=cpu" in problem.sentence
    assert problems(BenchConfig(devices=devices, cluster=SPEC.for_task(server(0))), gpus=0) == []


def test_one_gpu_is_enough_for_one_device() -> None:
    assert problems(BenchConfig(devices=DeviceConfig(device="gpu")), gpus=1) == []
    assert problems(BenchConfig(devices=DeviceConfig(device="auto")), gpus=0) == []


def test_a_server_need_not_have_the_package_of_a_model() -> None:
    config = BenchConfig(model="no_such_package_here.models:net", cluster=SPEC)
    assert [problem.rule for problem in problems(config)] == ["model"]
    assert problems(dataclasses.replace(config, cluster=SPEC.for_task(server(0)))) == []
