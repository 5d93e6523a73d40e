"""mpirun for real: Open MPI and MPICH start the ranks of one host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.parts import install
from engines.trainings import BENCH, PROGRAM, RUN, bits, die_once, digests
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Finished, Program

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LOOPBACK = ("--mca", "oob_tcp_if_include", "lo", "--mca", "btl", "self")


@pytest.fixture(scope="module", autouse=True)
def _both() -> None:
    install(("mpirun.openmpi", "mpirun.mpich"), ("openmpi-bin", "mpich"))


def open_mpi(*words: str) -> Finished:
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    options = ("-np", "3", "--oversubscribe", "--bind-to", "none", *LOOPBACK, *as_root)
    with Program(("mpirun.openmpi", *options, *words), ONE_THREAD) as program:
        return program.wait(400)


def mpich(*words: str) -> Finished:
    master = ("-genv", "MASTER_ADDR", "127.0.0.1", "-genv", "MASTER_PORT", str(free_port()))
    with Program(("mpirun.mpich", "-np", "3", *master, *words), ONE_THREAD) as program:
        return program.wait(400)


def test_a_killed_program_comes_back_to_the_bits_of_one_that_mpich_started(tmp_path: Path) -> None:
    undisturbed = mpich(*RUN, *PROGRAM)
    assert undisturbed.code == 0, undisturbed
    done = open_mpi(*RUN, *PROGRAM, *die_once(1, 5, tmp_path / "once"))
    assert done.code == 0, done
    assert "(1 of 3 restarts)" in done.stderr
    assert digests(done.stdout) == digests(undisturbed.stdout)


def test_the_bench_needs_no_lists(tmp_path: Path) -> None:
    done = open_mpi(*RUN, *LOCKSTEP, *BENCH, "--num_batches=20", f"--train_dir={tmp_path}")
    assert done.code == 0, done
    assert bits(tmp_path)
