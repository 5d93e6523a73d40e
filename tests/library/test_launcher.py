"""What torchrun, srun and mpirun leave in the environment, and what is made of it."""

from __future__ import annotations

import pytest

from lockstep.cli.library_flags import cluster_flags
from lockstep.errors import BadInput
from lockstep.library.launcher import (
    FIRST_PORT,
    LAST_PORT,
    Launch,
    first_node,
    launched_by,
    worker_variables,
)
from lockstep.transports.control.addresses import Address

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "777",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[03-04,11]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "3",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}


def test_a_process_that_nobody_launched() -> None:
    assert launched_by({"PATH": "/bin", "MASTER_ADDR": "10.0.0.1"}) is None


def test_torchrun() -> None:
    # The port itself is taken by torchrun's own store.
    assert launched_by(TORCHRUN) == Launch("torchrun", 2, 3, Address("10.0.0.1", 29501))


def test_torchrun_with_its_own_store() -> None:
    agent = {**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    found = launched_by(agent)
    assert found == Launch("torchrun", 2, 3, Address("10.0.0.1", 29501), Address("10.0.0.1", 29500), "2", True)
    # Where a port or an address was asked for, rank 0 listens there.
    assert launched_by(agent, port=7000) == Launch("torchrun", 2, 3, Address("10.0.0.1", 7000), None, "2", True)
    assert launched_by(agent, "10.0.0.1:7000") == Launch("torchrun", 2, 3, Address("10.0.0.1", 7000), again=True)


def test_srun_gathers_on_its_first_node() -> None:
    found = launched_by(SRUN)
    assert found is not None
    assert (found.launcher, found.rank, found.world, found.address.host) == ("srun", 1, 4, "gpu03")
    assert FIRST_PORT <= found.address.port < LAST_PORT
    assert launched_by({**SRUN, "SLURM_PROCID": "3"}).address == found.address  # type: ignore[union-attr]
    other_step = launched_by({**SRUN, "SLURM_STEP_ID": "1"})
    assert other_step is not None
    assert other_step.address.port != found.address.port


def test_a_batch_script_is_no_rank_although_slurm_numbers_it() -> None:
    batch = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert launched_by(batch) is None


@pytest.mark.parametrize(("count", "again"), [(None, False), ("0", False), ("1", True), ("10", True)])
def test_a_requeued_job_is_told_from_a_new_one(count: str | None, again: bool) -> None:
    environ = SRUN if count is None else {**SRUN, "SLURM_RESTART_COUNT": count}
    found = launched_by(environ)
    assert found is not None
    assert found.again is again


def test_mpirun_inside_an_allocation_of_slurm_counts_its_own_processes() -> None:
    """srun starts one process per node for it, and their numbers are in the environment too."""
    found = launched_by({**SRUN, **MPIRUN, "SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    assert found is not None
    assert (found.launcher, found.rank, found.world) == ("mpirun", 0, 3)


def test_mpich_with_the_address_of_rank_0() -> None:
    mpich = {"PMI_RANK": "1", "PMI_SIZE": "3", "MASTER_ADDR": "node1", "MASTER_PORT": "5000"}
    assert launched_by(mpich) == Launch("mpirun of MPICH", 1, 3, Address("node1", 5001))
    assert launched_by({**SRUN, **mpich}).launcher == "srun"  # type: ignore[union-attr]  # it offers PMI too


def test_mpirun_on_one_machine() -> None:
    found = launched_by(MPIRUN)
    assert found is not None
    assert (found.launcher, found.rank, found.world, found.address.host) == ("mpirun", 0, 3, "127.0.0.1")


def test_mpirun_on_several_machines_needs_an_address() -> None:
    several = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(BadInput, match="does not give its processes the address of rank 0; add -x MASTER_ADDR"):
        launched_by(several)
    by_hand = launched_by({**several, "MASTER_ADDR": "node1", "MASTER_PORT": "5000"})
    assert by_hand is not None
    assert by_hand.address == Address("node1", 5001)
    given = launched_by(several, "node1:7000")
    assert given is not None
    assert given.address == Address("node1", 7000)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({**TORCHRUN, "RANK": "x"}, "RANK should hold a number, but holds 'x'"),
        ({**TORCHRUN, "RANK": "3"}, "RANK=3 is not below WORLD_SIZE=3"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "without MASTER_ADDR and MASTER_PORT"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}, "do not name the nodes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "add -genv MASTER_ADDR HOST -genv MASTER_PORT PORT"),
    ],
)
def test_variables_that_make_no_sense(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        launched_by(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[03-07,12],login1", "gpu03"),
        ("rack2-n[9]", "rack2-n9"),
        ("a[001-100].cluster.org", "a001.cluster.org"),
        ("", None),
    ],
)
def test_first_node_of_a_list_as_slurm_writes_it(nodes: str, first: str | None) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(
    ("launcher", "environ", "expected"),
    [
        ("torchrun", TORCHRUN, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
        ("torchrun", {**SRUN, **TORCHRUN}, {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
        ("srun", SRUN, {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}),
        (
            "mpirun",
            MPIRUN,
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"},
        ),
    ],
)
def test_beside_servers_the_launchers_variables_count_workers(
    launcher: str, environ: dict[str, str], expected: dict[str, str]
) -> None:
    """transformers' Trainer used to wait for the rank that serves. Variables that are not there are not made."""
    assert worker_variables(environ, launcher, ["10.0.0.1:4000", "10.0.0.2:4000"], 1) == expected


def test_the_local_rank_is_a_workers_place_on_its_host() -> None:
    hosts = ["10.0.0.1:4000", "10.0.0.2:4000", "10.0.0.1:4001", "10.0.0.1:4002"]
    found = worker_variables({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "torchrun", hosts, 2)
    assert found == {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}


def test_flags_of_the_cluster_are_taken_and_the_rest_left() -> None:
    words = "data/ --job_name=worker --task_index 1 --epochs=3 --ps_hosts=a:1,b:2 --worker_hosts=c:3,d:4"
    choices = "--nocross_replica_sync --replicas_to_aggregate=1 --on_nan=skip -v"
    ours, rest = cluster_flags([*words.split(), *choices.split()])
    assert ours == {
        "job_name": "worker",
        "task_index": 1,
        "ps_hosts": ("a:1", "b:2"),
        "worker_hosts": ("c:3", "d:4"),
        "synchronous": False,
        "replicas_to_aggregate": 1,
        "on_nan": "skip",
    }
    assert rest == ["data/", "--epochs=3", "-v"]


def test_a_switch_of_the_cluster_leaves_the_word_after_it_to_the_program() -> None:
    assert cluster_flags(["--from_scratch", "data/"]) == ({"from_scratch": True}, ["data/"])


def test_a_flag_of_the_cluster_with_a_bad_value_gets_a_sentence() -> None:
    with pytest.raises(BadInput, match="reduction"):
        cluster_flags(["--reduction=median"])
