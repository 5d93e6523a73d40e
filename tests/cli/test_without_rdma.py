"""``grpc+verbs`` on a machine without RDMA: one sentence and exit code 2, whoever asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import lockstep
from lockstep.cli import bench, doctor, ps
from lockstep.cli.main import main
from lockstep.errors import BadInput
from lockstep.transports.registry import runs_here

pytestmark = pytest.mark.skipif(runs_here("grpc+verbs"), reason="this machine has an RDMA device")

SENTENCE = (
    "--server_protocol=grpc+verbs needs an RDMA device, but /sys/class/infiniband shows none; load the driver of the "
    "network card, make the device visible in the container, or use --server_protocol=grpc."
)
VERBS = "--server_protocol=grpc+verbs"
LISTS = ("--ps_hosts=127.0.0.1:7411", "--worker_hosts=127.0.0.1:7412", VERBS)


def test_bench_refuses_in_one_sentence() -> None:
    with pytest.raises(BadInput) as refused:
        bench.run(("--ps=1", "--workers=1", "--device=cpu", "--model=trivial", VERBS))
    assert str(refused.value) == SENTENCE


def test_a_server_refuses_in_one_sentence() -> None:
    with pytest.raises(BadInput) as refused:
        ps.run(LISTS)
    assert str(refused.value) == SENTENCE


def test_the_library_refuses_in_one_sentence() -> None:
    with pytest.raises(BadInput) as refused:
        lockstep.join(
            ps_hosts=("127.0.0.1:7411",),
            worker_hosts=("127.0.0.1:7412",),
            job_name="worker",
            server_protocol="grpc+verbs",
        )
    assert str(refused.value) == SENTENCE


def test_the_doctor_says_the_same_sentence_and_ends_as_the_job_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run((*LISTS, "--device=cpu")) == 2
    assert SENTENCE in capsys.readouterr().out


def test_the_command_ends_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ps", *LISTS]) == 2
    assert capsys.readouterr().err == f"lockstep: {SENTENCE}\n"


def test_a_program_of_ones_own_ends_with_the_sentence_and_exit_code_2() -> None:
    program = (
        "import lockstep; lockstep.join(ps_hosts=['127.0.0.1:7411'], worker_hosts=['127.0.0.1:7412'], "
        "job_name='worker', server_protocol='grpc+verbs')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.returncode, ended.stderr) == (2, f"lockstep: {SENTENCE}\n")
