"""A server of the library: its cores under any launcher, its GPU, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import lockstep
from helpers.ports import free_ports
from helpers.programs import run_lockstep
from lockstep.library.settings import Exchange, library_settings
from lockstep.protocol.coordinator.recovery import RecoveryRules
from lockstep.runtime.startup.cluster import ClusterSpec
from lockstep.training.server.piece_pool import MOST_THREADS

NO_GPU = "device='gpu' was asked for, but torch sees no GPU"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")

MADE = """
import torch
from lockstep.library.serving import StoreChoice, make_store
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.runtime.startup.cluster import ClusterSpec
cluster = ClusterSpec(ps_hosts=("a:1",), worker_hosts=("a:2",), task=TaskId(Role.SERVER, 0))
store = make_store(StoreChoice(), cluster)
print(store._crew.size, torch.get_num_threads())
store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "3"], ids=["as torchrun says", "as a shell may say"])
def test_a_server_uses_the_cores_of_its_host_whatever_the_launcher_says(threads: str) -> None:
    """torchrun sets OMP_NUM_THREADS=1, and fifteen of sixteen cores slept during updates."""
    environment = {**os.environ, "OMP_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-c", MADE], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    cores = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    pool, torchs = map(int, done.stdout.split())
    assert 1 <= pool <= cores, "a control group may have fewer"
    assert pool == cores or os.path.exists("/sys/fs/cgroup/cpu.max")
    assert torchs == 1


def lists() -> dict[str, Any]:
    first, second = free_ports(2)
    return {"ps_hosts": [f"127.0.0.1:{first}"], "worker_hosts": [f"127.0.0.1:{second}"]}


@without_gpu
def test_a_gpu_that_is_not_there_is_refused_by_join() -> None:
    with pytest.raises(lockstep.BadInput, match=NO_GPU):
        lockstep.join(job_name="ps", device="gpu", **lists())


@pytest.mark.slow
@without_gpu
def test_a_gpu_that_is_not_there_is_refused_by_ps_with_exit_code_2() -> None:
    words = [f"--{name}={','.join(addresses)}" for name, addresses in lists().items()]
    done = run_lockstep("ps", *words, "--task_index=0", "--device=gpu", timeout=60)
    assert done.code == 2
    assert NO_GPU in done.stderr


def test_a_device_that_nobody_knows() -> None:
    with pytest.raises(lockstep.BadInput, match="device='tpu' is not known; use one of: cpu, gpu"):
        lockstep.join(job_name="ps", device="tpu", **lists())


def test_all_tasks_must_agree_on_the_wire() -> None:
    cluster = ClusterSpec(ps_hosts=("a:1",), worker_hosts=("a:2",))
    wide, narrow = (
        library_settings(cluster, Exchange(wire_dtype=name), RecoveryRules()) for name in ("float32", "bfloat16")
    )
    assert [one.name for one, other in zip(wide, narrow, strict=True) if one != other] == ["wire_dtype"]
