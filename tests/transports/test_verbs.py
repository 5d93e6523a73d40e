"""``grpc+verbs`` as far as it can be seen without a device; the rest is in ``tests/rdma``."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli.flags import parse_bench
from lockstep.cli.flags.build import RDMA_FLAGS
from lockstep.cli.library_flags import cluster_flags
from lockstep.cli.start_checks import gpudirect_limits
from lockstep.transports.ucx.agent import Nixl
from lockstep.transports.verbs import provider
from lockstep.transports.verbs.checks import (
    LEAST_LOCKED_BYTES,
    UNLIMITED,
    device_problems,
    gpudirect_problems,
    lockable_memory,
    locked_memory_problems,
    needs_system_verbs,
)
from lockstep.transports.verbs.devices import VERBS_LIBRARY, RdmaFacts, RdmaPort, nixl_packages, system_library
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions, option_problems, ucx_settings
from lockstep.transports.verbs.probe_timer import ProbeTimer, proves_that_there_is_no_path

PORTS = (
    RdmaPort("mlx5_0", 1, "DOWN", "Ethernet", "mlx5", ("fe80::1",), (0,)),
    RdmaPort("mlx5_1", 1, "ACTIVE", "Ethernet", "mlx5", ("fe80::2", "::ffff:10.0.0.2"), (0, 3)),
    RdmaPort("rxe0", 1, "ACTIVE", "Ethernet", "rxe", ("fe80::3",), (0,)),
)
FACTS = RdmaFacts(PORTS, 3, ("mlx5", "rxe"), ("mlx5",), "/usr/lib64/libibverbs.so.1")

FLAGS = {
    "--rdma_gid_index=3": ("UCX_IB_GID_INDEX", "3"),
    "--rdma_traffic_class=106": ("UCX_IB_TRAFFIC_CLASS", "106"),
    "--rdma_service_level=2": ("UCX_IB_SL", "2"),
    "--rdma_timeout=0.5": ("UCX_RC_TIMEOUT", "500000us"),
    "--rdma_retry_count=5": ("UCX_RC_RETRY_COUNT", "5"),
}
CLUSTER = ("--ps=1", "--workers=1", "--device=cpu", "--model=trivial", "--server_protocol=grpc+verbs")


def options_of(*flags: str) -> RdmaOptions:
    config = parse_bench((*CLUSTER, *flags), {})
    assert config.cluster is not None
    return config.cluster.rdma


@pytest.mark.parametrize("flag", FLAGS)
def test_each_flag_reaches_ucx(flag: str) -> None:
    settings = ucx_settings(options_of(flag), "mlx5_1", 1)
    assert FLAGS[flag] in settings
    assert len(settings) == 3


def test_ucx_is_held_to_rdma_and_to_one_port_and_is_told_nothing_that_nobody_chose() -> None:
    assert ucx_settings(NO_OPTIONS, "mlx5_1", 2) == (("UCX_TLS", "rc"), ("UCX_NET_DEVICES", "mlx5_1:2"))


def test_every_option_has_a_flag_and_programs_of_ones_own_take_it_too() -> None:
    flags = {*(flag.partition("=")[0] for flag in FLAGS), "--rdma_device", "--rdma_gpudirect"}
    assert flags == {f"--{name}" for name in RDMA_FLAGS}
    arguments, rest = cluster_flags(["--rdma_device", "mlx5_1:1", "--rdma_retry_count=4", "--mine"])
    assert arguments == {"rdma": RdmaOptions(device="mlx5_1:1", retry_count=4)}
    assert rest == ["--mine"]


def test_gpudirect_needs_a_kernel_that_lets_a_network_device_into_a_gpu(tmp_path: Path) -> None:
    direct = RdmaOptions(gpudirect=True)
    modules, driver = tmp_path / "module", tmp_path / "version"
    assert list(gpudirect_problems(NO_OPTIONS, modules, driver)) == []
    (no_driver,) = gpudirect_problems(direct, modules, driver)
    assert "needs a GPU and NVIDIA's driver, which is not loaded here" in no_driver
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65")
    (no_module,) = gpudirect_problems(direct, modules, driver)
    assert "run 'modprobe nvidia_peermem', or leave out the flag." in no_module
    driver.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65")
    assert list(gpudirect_problems(direct, modules, driver)) == []
    driver.unlink()
    (modules / "nvidia_peermem").mkdir(parents=True)
    assert list(gpudirect_problems(direct, modules, driver)) == []


def test_with_gpudirect_ucx_knows_memory_of_gpus() -> None:
    assert ("UCX_TLS", "rc,cuda_copy") in ucx_settings(RdmaOptions(gpudirect=True), "mlx5_1", 1)


def test_gpudirect_is_for_workers_with_gpus() -> None:
    hosts = ("--ps_hosts=10.0.0.1:1", "--worker_hosts=10.0.0.1:2", "--server_protocol=grpc+verbs", "--rdma_gpudirect")
    on_cpu = parse_bench((*hosts, "--job_name=worker", "--device=cpu"), {})
    assert gpudirect_limits(on_cpu) == ["--rdma_gpudirect is for GPU memory; leave it out with --device=cpu."]
    assert gpudirect_limits(parse_bench((*hosts, "--job_name=ps"), {})) == []
    (sentence,) = gpudirect_limits(parse_bench((*hosts, "--job_name=worker"), {}))
    assert "--rdma_gpudirect needs" in sentence


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "a:b"}, "--rdma_device=a:b is not a device; write NAME or NAME:PORT"),
        ({"device": "../x"}, "is not a device"),
        ({"gid_index": -1}, "--rdma_gid_index=-1 is out of range; give a number from 0 to 255."),
        ({"traffic_class": 256}, "from 0 to 255"),
        ({"service_level": 16}, "from 0 to 15"),
        ({"retry_count": 8}, "from 0 to 7"),
        ({"timeout": 0.0}, "--rdma_timeout=0 is out of range"),
        ({"timeout": 31.0}, "up to 30"),
    ],
)
def test_values_that_mean_nothing_are_refused(options: dict[str, object], text: str) -> None:
    (sentence,) = option_problems(RdmaOptions(**options))  # type: ignore[arg-type]
    assert text in sentence


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (RdmaOptions(device="mlx5_7"), "mlx5_7 is not on this machine, which has mlx5_0:1, mlx5_1:1, rxe0:1"),
        (RdmaOptions(device="mlx5_1:2"), "mlx5_1:2 is not on this machine"),
        (RdmaOptions(device="mlx5_0"), "no RDMA port is active (mlx5_0 port 1 is DOWN)"),
        (RdmaOptions(gid_index=1), "is empty on mlx5_1 port 1, which has 0 (fe80::2), 3 (::ffff:10.0.0.2)"),
    ],
)
def test_what_was_asked_for_is_compared_with_what_is_there(options: RdmaOptions, text: str) -> None:
    (sentence,) = device_problems(FACTS, options)
    assert text in sentence


def test_the_first_active_port_is_good_enough() -> None:
    assert device_problems(FACTS, NO_OPTIONS) == []
    assert device_problems(FACTS, RdmaOptions(device="mlx5_1:1", gid_index=3)) == []


def test_a_device_without_provider_in_nixl_needs_the_systems_libraries() -> None:
    rxe = RdmaOptions(device="rxe0")
    assert needs_system_verbs(FACTS, PORTS[2])
    assert not needs_system_verbs(FACTS, PORTS[1])
    assert device_problems(FACTS, rxe) == []
    (lacking,) = device_problems(dataclasses.replace(FACTS, providers=("mlx5",)), rxe)
    assert "no provider rxe for rxe0 (it has mlx5), and NIXL ships only mlx5; install" in lacking


def test_too_little_lockable_memory_is_told_with_numbers_and_command() -> None:
    (sentence,) = locked_memory_problems(65536)
    assert "may lock only 64 KiB of memory here" in sentence
    assert "ulimit -l unlimited" in sentence
    assert list(locked_memory_problems(UNLIMITED)) == list(locked_memory_problems(LEAST_LOCKED_BYTES)) == []
    assert lockable_memory() >= UNLIMITED


def test_settings_are_given_to_ucx_in_c_and_python_does_not_see_them() -> None:
    code = (
        "import ctypes, os; from lockstep.transports.ucx.agent import Nixl\n"
        "Nixl(None, (('UCX_NET_DEVICES', 'mlx5_1:1'),)).apply_settings()\n"
        "library = ctypes.CDLL(None); library.getenv.restype = ctypes.c_char_p\n"
        "print(library.getenv(b'UCX_NET_DEVICES').decode(), os.environ.get('UCX_NET_DEVICES'))"
    )
    # Another test may have made an agent in this process: its settings are not passed on.
    own = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True, env=own)
    assert done.stdout.split() == ["mlx5_1:1", "None"]
    assert Nixl(None, ()).settings == ()


needs_libraries = pytest.mark.skipif(
    nixl_packages() is None or system_library(VERBS_LIBRARY) is None, reason="needs NIXL and a libibverbs of the system"
)


@needs_libraries
def test_nixl_can_be_loaded_with_the_systems_libibverbs(tmp_path: Path) -> None:
    """What a device needs if its provider is not mlx5. The mapped files show which library was loaded."""
    code = (
        "import tempfile, sys; tempfile.tempdir = sys.argv[1]\n"
        "from lockstep.transports.ucx.agent import Agent, load_nixl\n"
        "from lockstep.transports.verbs.provider import nixl_with_system_verbs\n"
        "folder = nixl_with_system_verbs()\n"
        "agent = Agent(load_nixl(folder=folder), 'probe')\n"
        "assert nixl_with_system_verbs() == folder and load_nixl(folder=folder)\n"
        "print({line.split()[-1] for line in open('/proc/self/maps') if 'libibverbs' in line})"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    library = system_library(VERBS_LIBRARY)
    assert library is not None
    assert done.stdout.strip() == f"{{'{library.resolve()}'}}"
    assert len(list(tmp_path.iterdir())) == 1


@needs_libraries
def test_libraries_are_never_loaded_from_a_folder_that_somebody_else_could_have_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = provider.nixl_with_system_verbs()
    folder.parent.chmod(0o777)
    another = provider.nixl_with_system_verbs()
    assert another.parent != folder.parent
    assert another.parent.stat().st_mode & 0o777 == 0o700


def look_for(seconds: float, gaps: dict[float, float]) -> ProbeTimer:
    """Look until it is over, or for that many seconds; ``gaps``: when, and for how long, nothing runs."""
    now = 0.0
    looks = ProbeTimer(now)
    while now < seconds and not looks.over(now):
        now += looks.pause
        for at in [at for at in gaps if at <= now]:
            now += gaps.pop(at)
    return looks


def test_who_looks_for_the_probe_all_the_time_proves_that_there_is_no_path() -> None:
    looks = look_for(100.0, {})
    assert looks.frozen == 0.0
    assert proves_that_there_is_no_path(looks.frozen, looks.frozen)


@pytest.mark.parametrize("gaps", [{0.5: 7.0}, {2.0: 1.2, 4.0: 1.2}], ids=["an import", "two of them"])
def test_who_was_kept_from_running_has_proven_nothing(gaps: dict[float, float]) -> None:
    looks = look_for(100.0, dict(gaps))
    assert looks.frozen > 1.0
    assert not proves_that_there_is_no_path(looks.frozen, 0.0)
    assert not proves_that_there_is_no_path(0.0, looks.frozen)


def test_the_longer_a_probe_is_looked_for_the_less_of_the_processor_that_takes() -> None:
    assert ProbeTimer(0.0).pause == 0.001
    assert look_for(0.5, {}).pause == pytest.approx(0.025, rel=0.1)
    assert look_for(4.0, {}).pause == 0.05
