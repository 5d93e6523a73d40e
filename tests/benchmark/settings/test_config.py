"""What a run is: optimizers, settings that must agree, sizes."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from lockstep.benchmark.settings.config import (
    OPTIMIZERS,
    BenchConfig,
    DeviceConfig,
    ExchangeConfig,
    LocalCluster,
    OptimizerConfig,
    OutputConfig,
    RunLength,
    resolved,
    settings,
    store_port,
)
from lockstep.protocol.core.ids import server, worker
from lockstep.runtime.startup.cluster import ClusterSpec

SPEC = ClusterSpec(ps_hosts=("a:1",), worker_hosts=("b:1", "c:1"), task=worker(0))
CONFIG = BenchConfig(cluster=SPEC)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_one_that_torch_can_make(name: str) -> None:
    optimizer = OptimizerConfig(name=name)
    kind = getattr(torch.optim, optimizer.kind)
    # As it arrives at a server: through JSON.
    options = json.loads(json.dumps(optimizer.options()))
    made = kind([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=optimizer.weight_decay, **options)
    assert made.defaults["weight_decay"] == 4e-5


def test_optimizers_carry_their_own_numbers() -> None:
    rates = OptimizerConfig(
        momentum=0.1,
        rmsprop_decay=0.2,
        rmsprop_momentum=0.3,
        rmsprop_epsilon=0.4,
        adam_beta1=0.5,
        adam_beta2=0.6,
        adam_epsilon=0.7,
    )
    options = {name: dataclasses.replace(rates, name=name).options() for name in OPTIMIZERS}
    assert options == {
        "sgd": {},
        "momentum": {"momentum": 0.1, "nesterov": True},
        "rmsprop": {"alpha": 0.2, "momentum": 0.3, "eps": 0.4},
        "adam": {"betas": (0.5, 0.6), "eps": 0.7},
        "adamw": {"betas": (0.5, 0.6), "eps": 0.7},
    }


def test_momentum_of_zero_is_plain_sgd_and_not_an_error_of_torch() -> None:
    options = OptimizerConfig(name="momentum", momentum=0.0).options()
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, **options)  # type: ignore[arg-type]


def test_a_batch_of_zero_becomes_the_models_own() -> None:
    assert resolved(BenchConfig(model="resnet50")).run.batch_size == 64
    assert resolved(BenchConfig(model="alexnet", data_name="cifar10")).run.batch_size == 128
    assert resolved(BenchConfig(run=RunLength(batch_size=5))).run.batch_size == 5


def test_a_model_of_another_package_keeps_its_batch_open() -> None:
    config = BenchConfig(model="torchvision:resnet18")
    assert resolved(config) == config
    assert ("batch_size", "the model's own") in [(setting.name, setting.value) for setting in settings(config)]


def test_the_workers_of_a_run_are_counted_however_it_is_started() -> None:
    assert BenchConfig().num_workers == 1
    assert BenchConfig(cluster=SPEC).num_workers == 2
    assert BenchConfig(cluster=ClusterSpec(), local=LocalCluster(servers=1, workers=3)).num_workers == 3


def test_without_a_word_the_store_takes_no_port_of_a_worker() -> None:
    for ports, expected in (((7, 1), 8), ((7, 8), 9), ((7, 9, 8), 10)):
        spec = ClusterSpec(worker_hosts=tuple(f"a:{port}" for port in ports), task=worker(0), has_servers=False)
        assert store_port(BenchConfig(cluster=spec)) == expected


def test_warm_up_counts_as_steps() -> None:
    assert RunLength(num_batches=5, num_warmup_batches=2).steps == 7


DIFFERENT: dict[str, BenchConfig] = {
    "model": dataclasses.replace(CONFIG, model="lenet"),
    "data_name": dataclasses.replace(CONFIG, data_name="cifar10"),
    "batch_size": dataclasses.replace(CONFIG, run=RunLength(batch_size=3)),
    "num_batches": dataclasses.replace(CONFIG, run=RunLength(num_batches=3)),
    "num_warmup_batches": dataclasses.replace(CONFIG, run=RunLength(num_warmup_batches=3)),
    "variable_update": dataclasses.replace(CONFIG, exchange=ExchangeConfig(variable_update="distributed_replicated")),
    "cross_replica_sync": dataclasses.replace(CONFIG, exchange=ExchangeConfig(cross_replica_sync=False)),
    "bucket_mb": dataclasses.replace(CONFIG, exchange=ExchangeConfig(bucket_bytes=1 << 20)),
    "optimizer": dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name="momentum")),
    "init_learning_rate": dataclasses.replace(CONFIG, optimizer=OptimizerConfig(init_learning_rate=0.5)),
    "weight_decay": dataclasses.replace(CONFIG, optimizer=OptimizerConfig(weight_decay=0.0)),
    "server_protocol": dataclasses.replace(CONFIG, cluster=dataclasses.replace(SPEC, protocol="other")),
    "number of servers": dataclasses.replace(CONFIG, cluster=SPEC.with_hosts(("a:1", "a:2"), SPEC.worker_hosts)),
    "number of workers": dataclasses.replace(CONFIG, cluster=SPEC.with_hosts(SPEC.ps_hosts, ("b:1",))),
}


@pytest.mark.parametrize(("name", "config"), DIFFERENT.items(), ids=DIFFERENT)
def test_a_difference_that_counts_shows_in_the_settings_under_its_name(name: str, config: BenchConfig) -> None:
    theirs = {setting.name: setting.value for setting in settings(CONFIG)}
    ours = {setting.name: setting.value for setting in settings(config)}
    assert name in [key for key in ours if ours[key] != theirs[key]]
    # Another data set may bring another default batch; nothing else goes with it.
    assert {key for key in ours if ours[key] != theirs[key]} <= {name, "batch_size"}


def test_the_numbers_of_an_optimizer_count_too() -> None:
    quick, slow = (
        dataclasses.replace(CONFIG, optimizer=OptimizerConfig(name="momentum", momentum=number))
        for number in (0.5, 0.9)
    )
    assert settings(quick) != settings(slow)


def test_what_may_differ_between_tasks_is_not_in_the_settings() -> None:
    server_side = BenchConfig(cluster=SPEC.for_task(server(0)))
    worker_side = BenchConfig(
        cluster=dataclasses.replace(SPEC, bind="0.0.0.0"),
        devices=DeviceConfig(device="gpu", num_gpus=8, num_threads=3),
        output=OutputConfig(train_dir="/data", display_every=1),
    )
    assert settings(server_side) == settings(worker_side)


def test_the_seed_is_part_of_the_settings_because_it_decides_the_order_of_samples() -> None:
    ours, theirs = settings(CONFIG), settings(dataclasses.replace(CONFIG, seed=CONFIG.seed + 1))
    assert [one.name for one, other in zip(ours, theirs, strict=True) if one != other] == ["seed"]


def test_versions_are_part_of_the_settings() -> None:
    values = {setting.name: setting.value for setting in settings(CONFIG)}
    assert values["torch version"] == torch.__version__.partition("+")[0]
    assert values["lockstep version"]
    assert values["dtype"] == "float32"
