"""Programs of one's own as real processes: from flags, from torchrun, and from the variables of srun and mpirun."""

from __future__ import annotations

import json
import re
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.marks import others_long
from helpers.ports import free_port, free_ports, free_range
from helpers.programs import LOCKSTEP, Finished, Program, run_lockstep
from lockstep.cli.library_flags import cluster_flags
from lockstep.errors import BadInput
from lockstep.library.join import JoinArguments, join_with
from lockstep.library.settings import BACKENDS, WIRE_DTYPES
from lockstep.protocol.core.ids import server, worker

PROGRAM = (sys.executable, str(Path(__file__).with_name("program.py")))
SECONDS = 110.0
pytestmark = pytest.mark.timeout(240)

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


WITH_A_GROUP = """
import torch, torch.distributed as dist, lockstep
job = lockstep.join(servers=1)
dist.init_process_group("gloo")
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
job.wrap(model, optimizer)
model(torch.ones(1)).backward()
optimizer.step()
total = torch.tensor(job.worker + 1.0)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}\\n", end="", flush=True)
job.close()
dist.destroy_process_group()
"""

OF_TWO_WIDTHS = """
import hashlib, sys, torch, lockstep
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 600), torch.nn.Linear(16, 600, dtype=torch.float64))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
with lockstep.join(backend="own", bucket_mb=1 / 64, **lockstep.cluster_flags(sys.argv[1:])[0]) as job:
    job.wrap(model, optimizer)
    for step in job.steps(4, seed=1):
        optimizer.zero_grad()
        x = torch.randn(3, 16)
        (model[0](x).double() * model[1](x.double())).square().mean().backward()
        optimizer.step()
    whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"worker {job.worker} of {job.workers}: {hashlib.sha256(whole).hexdigest()[:16]}\\n", end="", flush=True)
"""

Command = tuple[tuple[str, ...], dict[str, str]]


def run_all(commands: list[Command]) -> list[Finished]:
    with ExitStack() as started:
        programs = [
            started.enter_context(Program(command, {**ONE_THREAD, **environment})) for command, environment in commands
        ]
        return [program.wait(SECONDS) for program in programs]


def digests(finished: list[Finished]) -> dict[str, str]:
    found = [re.search(r"worker (\d) of \d: (\w+)", one.stdout) for one in finished]
    return {match[1]: match[2] for match in found if match is not None}


def srun(rank: int, world: int, job: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(world),
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.1",
    }


def mpirun(rank: int, world: int, job: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
        "PMIX_NAMESPACE": f"prterun-test-{job}@1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", others_long([srun, mpirun], [mpirun]))
def test_three_processes_of_a_launcher_form_one_server_and_two_workers(launcher: object) -> None:
    job = free_port()
    environments = [launcher(rank, 3, job) for rank in range(3)]  # type: ignore[operator]
    finished = run_all([((*PROGRAM, "--servers=1"), environment) for environment in environments])
    assert [one.code for one in finished] == [0, 0, 0], finished
    found = digests(finished)
    assert set(found) == {"0", "1"}
    assert found["0"] == found["1"]
    assert finished[0].stdout == ""  # the server never comes to what follows join()


@pytest.mark.slow
def test_ranks_of_torchrun_meet_in_its_store_whatever_else_listens_beside_it() -> None:
    port, _ = free_range(2)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={port}")
    with socket.create_server(("127.0.0.1", port + 1)):
        (finished,) = run_all([((*launcher, PROGRAM[1]), {})])
    assert finished.code == 0, finished
    found = re.findall(r"worker \d of 3: (\w+)", finished.stdout)
    assert len(found) == 3, finished
    assert len(set(found)) == 1


@pytest.mark.slow
def test_beside_a_server_torch_distributed_has_the_workers_as_its_ranks(tmp_path: Path) -> None:
    """What frameworks do after join(); with the launcher's own numbers they waited for the rank that serves."""
    program = tmp_path / "program.py"
    program.write_text(WITH_A_GROUP)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=3", f"--master-port={free_port()}")
    (finished,) = run_all([((*launcher, str(program)), {})])
    assert finished.code == 0, finished
    assert sorted(re.findall(r"rank \d of \d: \S+", finished.stdout)) == ["rank 0 of 2: 3.0", "rank 1 of 2: 3.0"]


@pytest.mark.timed
@pytest.mark.parametrize("launched", [True, pytest.param(False, marks=[pytest.mark.slow, pytest.mark.long])])
def test_a_job_says_at_its_start_how_to_ask_it_and_why_asks_all_its_tasks(launched: bool) -> None:
    endless = (sys.executable, str(Path(__file__).with_name("endless_program.py")))
    commands: list[Command] = [
        ((*endless, "--servers=1"), srun(rank, 3, job)) for job in [free_port()] for rank in range(3)
    ]
    if not launched:
        commands = [(tuple(words), {}) for words in _with_lists(endless)]
    with ExitStack() as started:
        _, chief, other = [
            started.enter_context(Program(command, {**ONE_THREAD, **environment})) for command, environment in commands
        ]
        printed = chief.wait_for("training", 60)
        other.wait_for("training", 60)
        found = re.search(r"^lockstep: ask this job with: lockstep why (\S+)$", printed, re.MULTILINE)
        assert found is not None, printed
        assert "ask this job" not in other.stderr()
        answer = json.loads(run_lockstep("why", found[1], "--json", timeout=30).stdout)
    assert [task["task"] for task in answer["tasks"]] == [str(server(0)), str(worker(0)), str(worker(1))]
    assert all(task["answers"] for task in answer["tasks"]), answer


def _with_lists(program: tuple[str, ...]) -> list[tuple[str, ...]]:
    lists = hosts(1, 2)
    workers = [(*program, *lists, "--job_name=worker", f"--task_index={index}") for index in range(2)]
    return [(*LOCKSTEP, "ps", *lists, "--task_index=0"), *workers]


def hosts(servers: int, workers: int) -> tuple[str, str]:
    ports = [f"127.0.0.1:{port}" for port in free_ports(servers + workers)]
    return f"--ps_hosts={','.join(ports[:servers])}", f"--worker_hosts={','.join(ports[servers:])}"


def cluster_of(*extra: str, servers: int = 1, shared: tuple[str, ...] = ()) -> list[Command]:
    """``lockstep ps`` for every server, and the program for two workers."""
    lists = (*hosts(servers, 2), *shared)
    served: list[Command] = [((*LOCKSTEP, "ps", *lists, f"--task_index={index}"), {}) for index in range(servers)]
    trained: list[Command] = [
        ((*PROGRAM, *lists, "--job_name=worker", f"--task_index={i}", *extra), {}) for i in range(2)
    ]
    return [*served, *trained]


@pytest.mark.slow
def test_lockstep_ps_serves_a_program_that_it_does_not_know_and_that_forgets_to_close() -> None:
    finished = run_all(cluster_of("--forget", servers=2))
    assert [one.code for one in finished] == [0, 0, 0, 0], finished
    assert len(set(digests(finished).values())) == 1


@pytest.mark.slow
def test_an_exception_in_one_program_is_told_to_all() -> None:
    server, chief, other = run_all(cluster_of("--raise"))
    sentence = "orker 1 failed with KeyError: 'labels'"
    assert (server.code, chief.code, other.code) == (1, 1, 1)
    assert sentence in server.stderr
    assert sentence in chief.stderr
    assert "KeyError" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize("inside", others_long([(), ("--with",)], [()]), ids=["outside of a with block", "inside"])
def test_the_exit_code_of_a_program_that_gives_up_reaches_all(inside: tuple[str, ...]) -> None:
    server, chief, other = run_all(cluster_of("--exit", *inside))
    assert (server.code, chief.code, other.code) == (1, 1, 5)
    for one in (server, chief):
        assert re.search(r"orker 1 called sys\.exit\(5\) in \S+program\.py, line \d+", one.stderr), one.stderr


@pytest.mark.slow
def test_a_program_that_shuffles_with_another_seed_is_refused() -> None:
    server, chief, _ = run_all(cluster_of("--seed-differs"))
    assert (server.code, chief.code) == (1, 1)
    for one in (server, chief):
        assert "64 examples in batches of 4, shuffled with seed 1" in one.stderr


@pytest.mark.slow
def test_a_killed_program_that_nobody_waits_for_is_named_and_nothing_is_left_behind() -> None:
    server, chief, other = run_all(cluster_of("--die", shared=("--on_worker_loss=abort",)))
    assert other.code == -9
    assert server.code == 1
    assert chief.code == 1
    for one in (server, chief):
        assert re.search(r"[Ww]orker 1 was killed by SIGKILL", one.stderr), one.stderr
    assert "the loss of a worker ends this job: on_worker_loss is abort" in chief.stderr


@pytest.mark.slow
def test_other_choices_on_the_server_are_named() -> None:
    lists = hosts(1, 1)
    server, program = run_all(
        [
            ((*LOCKSTEP, "ps", *lists, "--reduction=sum"), {}),
            ((*PROGRAM, *lists, "--job_name=worker"), {}),
        ]
    )
    assert server.code == 1
    assert program.code == 1
    assert re.search("reduction=(mean|sum).*reduction=(sum|mean); start all tasks with the same value", program.stderr)


@pytest.mark.slow
def test_a_program_that_nobody_launched_is_a_job_of_one_rank() -> None:
    (alone,) = run_all([(PROGRAM, {})])
    assert alone.code == 0, alone
    assert "worker 0 of 1" in alone.stdout
    assert "1 rank trains, 0 serve" in alone.stderr


@pytest.mark.slow
def test_a_program_that_wants_a_server_and_was_not_launched_gets_one_sentence() -> None:
    (alone,) = run_all([((*PROGRAM, "--servers=1"), {})])
    assert alone.code == 2
    assert "servers=1 was given, but nobody started more processes than this one" in alone.stderr


@pytest.mark.parametrize(
    ("flag", "what"),
    [
        ("--nocross_replica_sync", "synchronous=False"),
        ("--replicas_to_aggregate=1", "replicas_to_aggregate"),
        ("--reduction=sum", "reduction='sum'"),
        ("--device=gpu", "device='gpu'"),
    ],
)
def test_what_only_servers_can_do_is_refused_without_them(flag: str, what: str) -> None:
    with pytest.raises(BadInput) as refused:
        join_with(JoinArguments(**cluster_flags([flag])[0]), {})  # type: ignore[arg-type]
    assert f"{what} needs servers, and every rank trains in this job; give servers=1" in str(refused.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_carries_the_gradients_of_ranks_is_refused_with_servers(backend: str) -> None:
    """It was ignored: who asked for NCCL never learned that servers do without it."""
    lists = [*hosts(1, 1), "--job_name=worker", f"--backend={backend}"]
    with pytest.raises(BadInput) as refused:
        join_with(JoinArguments(**cluster_flags(lists)[0]), {})  # type: ignore[arg-type]
    assert f"backend={backend!r} chooses what carries gradients where every rank trains" in str(refused.value)


@pytest.mark.slow
def test_ranks_that_send_16_bits_have_one_result_and_it_is_another(tmp_path: Path) -> None:
    """Also of numbers that stay as wide as they are, which a rank averages in another place."""
    program = tmp_path / "program.py"
    program.write_text(OF_TWO_WIDTHS)
    found = []
    for name in WIRE_DTYPES:
        job = free_port()
        command = (sys.executable, str(program), f"--wire_dtype={name}")
        finished = run_all([(command, srun(rank, 2, job)) for rank in range(2)])
        assert [one.code for one in finished] == [0, 0], finished
        found.append(digests(finished))
    assert [len(one) for one in found] == [2, 2]
    assert [len(set(one.values())) for one in found] == [1, 1]
    assert found[0] != found[1]


@pytest.mark.slow
def test_ranks_that_send_other_types_are_named() -> None:
    job = free_port()
    chief, other = run_all(
        [
            ((*PROGRAM, "--backend=own", f"--wire_dtype={name}"), srun(rank, 2, job))
            for rank, name in enumerate(WIRE_DTYPES)
        ]
    )
    assert 0 not in (chief.code, other.code)
    assert "wire_dtype=bfloat16" in other.stderr
    assert "start all tasks with the same value" in other.stderr


@pytest.mark.slow
def test_three_processes_of_a_launcher_are_three_ranks() -> None:
    job = free_port()
    finished = run_all([(PROGRAM, srun(rank, 3, job)) for rank in range(3)])
    assert [one.code for one in finished] == [0, 0, 0], finished
    found = digests(finished)
    assert set(found) == {"0", "1", "2"}
    assert len(set(found.values())) == 1
    assert "3 ranks train, 0 serve" in "".join(one.stderr for one in finished)


@pytest.mark.slow
def test_ranks_given_by_hand_need_no_list_of_servers() -> None:
    _, workers = hosts(0, 2)
    finished = run_all([((*PROGRAM, workers, "--job_name=worker", f"--task_index={i}"), {}) for i in range(2)])
    assert [one.code for one in finished] == [0, 0], finished
    assert len(set(digests(finished).values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", others_long(["own", "gloo"], ["own"]))
def test_a_killed_rank_is_named_by_the_others(backend: str) -> None:
    job = free_port()
    finished = run_all([((*PROGRAM, "--die", f"--backend={backend}"), srun(rank, 3, job)) for rank in range(3)])
    assert finished[1].code == -9
    for one in (finished[0], finished[2]):
        assert one.code == 1, one
        assert re.search(r"[Ww]orker 1 was killed by SIGKILL", one.stderr), one.stderr
