"""Every transport that can run here passes the suite, and the suite's command says so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance_hosts.hosts import Here
from helpers.transports import RUN_HERE
from lockstep.transports.conformance import CASES, SuiteCase, run_case
from lockstep.transports.registry import encrypted
from rdma.lab.network import working_folder

TESTS = Path(__file__).parents[1]
SMALL = [case for case in CASES if not case.large]


SLOWER = ("grpc+ucx", encrypted("grpc+tcp"))
"""Node processes of the first take longest to start; the rules of the second are those of its plain one. All their
cases run with the slow tests."""
TRANSPORTS = [
    pytest.param(name, marks=pytest.mark.slow if name in SLOWER else ()) for name in (*RUN_HERE, encrypted("grpc+tcp"))
]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_transport_keeps_the_rule_that(case: SuiteCase, transport: str) -> None:
    run_case(case, transport, Here())


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", RUN_HERE)
@pytest.mark.parametrize("case", [case for case in CASES if case.large], ids=lambda case: case.name)
def test_the_transport_keeps_the_large_rule_that(case: SuiteCase, transport: str) -> None:
    run_case(case, transport, Here())


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance_hosts", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=TESTS)


def test_the_command_prints_a_table_and_ends_well() -> None:
    done = run_command("grpc", "--only", "empty_write")
    assert done.returncode == 0, done.stderr
    assert "ok" in done.stdout
    assert "an empty write delivers its note" in done.stdout
    assert done.stdout.endswith("grpc: 1 of 1 cases passed\n")
    assert done.stderr == ""


@pytest.mark.parametrize("case", ["a_killed_peer", "a_frozen_peer", "next_life"])
def test_the_command_kills_and_freezes_processes_that_it_has_forked(case: str) -> None:
    done = run_command("grpc", "--only", case)
    assert done.stdout.endswith("grpc: 1 of 1 cases passed\n"), done.stdout + done.stderr


@pytest.fixture(name="node_host")
def _node_host() -> Iterator[str]:
    command = [sys.executable, "-m", "conformance_hosts.node_host", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=TESTS) as process:
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("Waiting at ").strip()
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=20)
        assert (process.returncode, complaints) == (0, "")


@pytest.mark.slow
@pytest.mark.long
def test_the_second_node_of_a_case_may_live_on_a_node_host(node_host: str) -> None:
    for case in ("tiny_and_odd_sizes", "a_killed_peer", "a_frozen_peer", "next_life"):
        done = run_command("grpc", "--only", case, "--node_host", node_host)
        assert done.stdout.endswith("grpc: 1 of 1 cases passed\n"), done.stdout + done.stderr


def test_a_node_host_that_does_not_run_is_bad_input() -> None:
    done = run_command("grpc", "--node_host", "127.0.0.1:1")
    assert done.returncode == 2
    assert "cannot reach --node_host=127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_refuses_a_transport_that_does_not_exist() -> None:
    done = run_command("pigeon")
    assert done.returncode == 2
    assert "'pigeon'" in done.stderr
    assert "grpc" in done.stderr


def test_the_suite_needs_neither_torch_nor_pytest() -> None:
    code = (
        "import sys; import conformance_hosts.node_host; import lockstep.transports.grpc.transport\n"
        "sys.exit(bool({'torch', 'pytest'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30, check=False, cwd=TESTS).returncode == 0


def test_the_folders_that_a_lab_host_gets_have_all_that_the_suite_needs(tmp_path: Path) -> None:
    """As in tests/rdma, where nothing else of this tree is there."""
    with working_folder() as packed:
        packed.seek(0)
        with tarfile.open(fileobj=packed) as tar:
            tar.extractall(tmp_path, filter="data")
    command = [sys.executable, "-m", "conformance_hosts", "grpc", "--only", "a_killed_peer"]
    path = os.pathsep.join(str(tmp_path / folder) for folder in ("src", "tests"))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=50, check=False, cwd=tmp_path, env=environment
    )
    assert done.stdout.endswith("grpc: 1 of 1 cases passed\n"), done.stdout + done.stderr
