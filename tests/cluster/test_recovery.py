"""Tasks of real clusters are killed and started again; the job goes on, and ends with the bits it would have had."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cluster.tasks import SMALL_RUN, STEPS, THE_RUN, TWO_AND_TWO, Tasks, any_case, final_of, tasks_of
from helpers.marks import others_long
from helpers.once import made_once
from helpers.ports import free_ports
from helpers.programs import run_lockstep, start_lockstep
from helpers.waiting import wait_until
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.ids import TaskId, server, worker
from lockstep.protocol.phrases import named
from lockstep.runtime.checkpoint.folder import verify
from lockstep.runtime.watch.events import EVENTS

pytestmark = pytest.mark.timed

RUN = THE_RUN
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "victim", others_long(TWO_AND_TWO.tasks(), [server(0), worker(1)]), ids=lambda t: t.short.replace(" ", "")
)
def test_a_killed_task_is_started_again_by_its_monitor_and_the_bits_are_the_same(
    victim: TaskId, undisturbed: bytes, tmp_path: Path
) -> None:
    flags = (*RUN, f"--train_dir={tmp_path}", "--save_model_steps=20", "--restarts=1")
    with tasks_of(TWO_AND_TWO, *flags) as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        others = [program for task, program in tasks.programs.items() if task != victim]
        for program in others:
            program.wait_for(any_case(victim), 10)
        results = tasks.finish(120)
    assert {done.code for done in results.values()} == {0}, results
    assert "Traceback" not in "".join(done.stderr for done in results.values())
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("victim", others_long(TWO_AND_TWO.server_ids(), [server(0)]), ids=["coordinator", "server"])
def test_the_second_home_of_a_killed_server_takes_over_and_the_bits_are_the_same(
    victim: TaskId, undisturbed: bytes, tmp_path: Path
) -> None:
    """Nothing is saved on the way, so there is no checkpoint to go back to. The next life of the server is late: when
    it looks for its job, that has ended, and the folder says so."""
    flags = (*RUN, f"--train_dir={tmp_path}", "--server_replicas=1")
    with tasks_of(TWO_AND_TWO, *flags, "--restarts=1") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
        lost = tasks.task_pid(victim)
        os.kill(lost, signal.SIGKILL)
        late = wait_until(lambda: (found := tasks.task_pid(victim)) != lost and found, 20, "the next life")
        os.kill(late, signal.SIGSTOP)
        other = next(task for task in TWO_AND_TWO.server_ids() if task != victim)
        tasks.programs[other].wait_for("another has taken its place", 60)
        tasks.programs[worker(0)].wait_for(f"\n{STEPS}\timages/sec:", 100)
        results = {task: program.wait(60) for task, program in tasks.programs.items() if task != victim}
        os.kill(late, signal.SIGCONT)
        results[victim] = tasks.programs[victim].wait(60)
    assert f"the job ended before {named(victim)} could come back to it" in results[victim].stderr
    assert {done.code for done in results.values()} == {0}, results
    assert "Traceback" not in "".join(done.stderr for done in results.values())
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed
    (last,) = (tmp_path / "checkpoints").glob("step-*")
    assert len(verify(last).shards) == 1, "the other one has written what both would have"
    events = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    ((teller, whole),) = [(event["task"], event["whole"]) for event in events if event["kind"] == ReportKind.REPLICA]
    assert (teller, whole) == (str(other), False)


def lose_both_homes(tasks: Tasks, together: bool) -> None:
    """Kill both servers: at once, or the coordinator's once it holds everything alone."""
    first, last = server(1), server(0)
    tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
    coordinator = tasks.task_pid(last)
    os.kill(tasks.task_pid(first), signal.SIGSTOP if together else signal.SIGKILL)
    if together:
        os.kill(tasks.task_pid(first), signal.SIGKILL)
    else:
        tasks.programs[last].wait_for("there is no replica", 20)
    os.kill(coordinator, signal.SIGKILL)


BOTH = pytest.mark.parametrize(
    "together", others_long([True, False], [False]), ids=lambda at_once: "at once" if at_once else "one after another"
)


@pytest.mark.slow
@pytest.mark.timeout(120)
@BOTH
def test_after_the_loss_of_both_homes_all_go_back_to_the_newest_checkpoint(
    together: bool, undisturbed: bytes, tmp_path: Path
) -> None:
    flags = (*RUN, f"--train_dir={tmp_path}", "--server_replicas=1", "--save_model_steps=20", "--restarts=1")
    with tasks_of(TWO_AND_TWO, *flags) as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        lose_both_homes(tasks, together)
        results = tasks.finish(60)
    assert {done.code for done in results.values()} == {0}, results
    assert "Traceback" not in "".join(done.stderr for done in results.values())
    assert re.search(r"Resuming at step [2-9]0", results[worker(0)].stdout), results[worker(0)]
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(120)
@BOTH
def test_without_a_checkpoint_the_loss_of_both_homes_ends_the_job_and_names_the_server(together: bool) -> None:
    with tasks_of(TWO_AND_TWO, "--num_batches=1000000", "--display_every=1", "--server_replicas=1") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        lose_both_homes(tasks, together)
        results = tasks.finish(40)
    for task in TWO_AND_TWO.tasks():
        assert results[task].code == (3 if task in TWO_AND_TWO.worker_ids() else 1), results
    for task in TWO_AND_TWO.worker_ids():  # either server: a worker may hear of both at once
        assert re.search(r"The job ended.*\. Server [01] was killed by SIGKILL", results[task].stderr), results


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_server_without_the_gpu_that_the_others_have_is_refused() -> None:
    first, second, third = (f"127.0.0.1:{port}" for port in free_ports(3))
    lists = (f"--ps_hosts={first},{second}", f"--worker_hosts={third}", "--job_name=ps", "--task_index=1")
    done = run_lockstep("bench", *lists, "--server_replicas=1", "--device=gpu", timeout=50)
    assert done.code == 2, done
    assert "torch sees no GPU on this server's host; give --local_parameter_device=cpu to all tasks." in done.stderr
    assert "Traceback" not in done.stderr


NARROW = (*RUN, "--wire_dtype=bfloat16")


@pytest.fixture(scope="module")
def undisturbed_narrow(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The same with gradients in 16 bits on their way."""
    return made_once(tmp_path_factory, "narrow", lambda: final_of(tmp_path_factory.mktemp("narrow"), *NARROW))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", [worker(0), worker(1), server(1)], ids=lambda t: t.short.replace(" ", ""))
def test_16_bit_gradients_survive_a_kill_and_give_other_bits_than_32(
    victim: TaskId, undisturbed: bytes, undisturbed_narrow: bytes, tmp_path: Path
) -> None:
    with tasks_of(TWO_AND_TWO, *NARROW, f"--train_dir={tmp_path}", "--save_model_steps=20", "--restarts=1") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        results = tasks.finish(150)
    assert {done.code for done in results.values()} == {0}, results
    final = (tmp_path / "final.safetensors").read_bytes()
    assert final == undisturbed_narrow
    assert final != undisturbed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_goes_on_compiled_and_with_another_type_on_the_wire_and_says_so(tmp_path: Path) -> None:
    small = ("--device=cpu", "--model=lenet", "--batch_size=4", "--num_threads=1", "--optimizer=momentum")
    flags = ("bench", *small, "--ps=2", "--workers=1", "--num_warmup_batches=0", f"--train_dir={tmp_path}")
    assert run_lockstep(*flags, "--num_batches=4", timeout=60).code == 0
    done = run_lockstep(*flags, "--num_batches=6", "--compile", "--wire_dtype=float16", timeout=300)
    assert done.code == 0, done.stderr
    assert "Resuming at step 4" in done.stdout
    assert "resuming with wire_dtype=float16, saved with float32; gradients are rounded differently" in done.stderr
    assert "resuming with compile=True, saved with False" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_lost_worker_is_named_within_5_seconds_and_waited_for_until_the_same_command_is_started_again(
    undisturbed: bytes, tmp_path: Path
) -> None:
    victim = worker(1)
    with tasks_of(TWO_AND_TWO, *RUN, f"--train_dir={tmp_path}") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(0)].wait_for("\n30\timages/sec:", 80)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        killed_at = time.monotonic()
        for task in TWO_AND_TWO.tasks():
            if task != victim:
                tasks.programs[task].wait_for(f"{named(victim)} is lost: it was killed by SIGKILL", 5)
        assert time.monotonic() - killed_at < 5
        assert tasks.programs[victim].wait(20).code == 1
        tasks.start(victim)
        results = tasks.finish(120)
    assert {done.code for done in results.values()} == {0}, results
    assert "has come back" in results[worker(0)].stderr
    assert (tmp_path / "final.safetensors").read_bytes() == undisturbed


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(180)
def test_who_does_not_come_back_ends_the_job_after_the_time_that_was_given() -> None:
    with tasks_of(TWO_AND_TWO, "--num_batches=1000000", "--rejoin_timeout=4") as tasks:
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        tasks.programs[worker(0)].wait_for("images/sec:", 80)
        os.kill(tasks.task_pid(worker(1)), signal.SIGKILL)
        results = tasks.finish(40)
    for task, done in results.items():
        assert done.code == (1 if task == worker(1) else 3), f"{task}: {done}"
    assert "did not come back within 4 s" in results[worker(0)].stderr


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(280)
def test_the_others_go_on_without_a_lost_worker_and_take_it_back(tmp_path: Path) -> None:
    victim = worker(1)
    # Steps that take long enough for the lost worker to be started again before the others are done.
    flags = ("--num_batches=300", *RUN[1:], f"--train_dir={tmp_path}", "--on_worker_loss=shrink")
    with tasks_of(TWO_AND_TWO, *flags) as tasks:
        tasks.flags = tuple(flag.replace("--batch_size=4", "--batch_size=32") for flag in tasks.flags)
        for task in TWO_AND_TWO.tasks():
            tasks.start(task)
        chief = tasks.programs[worker(0)]
        chief.wait_for("\n20\timages/sec:", 80)
        os.kill(tasks.task_pid(victim), signal.SIGKILL)
        chief.wait_for("the job goes on without it", 10)
        seen = last_step(chief.stdout())
        wait_until(lambda: last_step(chief.stdout()) > seen + 3, 20, "steps without it")
        assert tasks.programs[victim].wait(20).code == 1
        tasks.start(victim)
        results = tasks.finish(160)
    assert {done.code for done in results.values()} == {0}, results
    assert "has come back" in results[worker(0)].stderr


def last_step(output: str) -> int:
    return max((int(number) for number in re.findall(r"^(\d+)\timages/sec", output, re.MULTILINE)), default=0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(240)
def test_a_run_resumes_with_another_number_of_servers_and_the_same_bits(tmp_path: Path) -> None:
    small = ("--device=cpu", "--model=lenet", "--batch_size=4", "--num_threads=1", "--optimizer=momentum")
    flags = (*small, "--workers=2", "--num_warmup_batches=0")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_lockstep("bench", "--ps=2", *flags, "--num_batches=8", f"--train_dir={whole}", timeout=50).code == 0
    assert run_lockstep("bench", "--ps=1", *flags, "--num_batches=4", f"--train_dir={halves}", timeout=50).code == 0
    done = run_lockstep("bench", "--ps=2", *flags, "--num_batches=8", f"--train_dir={halves}", timeout=50)
    assert done.code == 0, done.stderr
    assert "Resuming at step 4" in done.stdout
    assert "the result does not change" in done.stderr
    assert (whole / "final.safetensors").read_bytes() == (halves / "final.safetensors").read_bytes()
    exported = tmp_path / "export.safetensors"
    shown = run_lockstep("checkpoint", "export", str(halves), str(exported), timeout=30)
    assert shown.code == 0, shown.stderr
    final, export = load_file(halves / "final.safetensors"), load_file(exported)
    assert final.keys() == export.keys()
    assert all((final[name] == export[name]).all() and final[name].shape == export[name].shape for name in final)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_train_dir_of_another_run_is_refused(tmp_path: Path) -> None:
    flags = ("--ps=1", "--workers=1", "--device=cpu", "--batch_size=2", "--num_batches=1", "--num_warmup_batches=0")
    assert run_lockstep("bench", *flags, "--model=lenet", f"--train_dir={tmp_path}", timeout=50).code == 0
    done = run_lockstep("bench", *flags, "--model=alexnet", f"--train_dir={tmp_path}", timeout=50)
    assert done.code == 2
    assert "belongs to another run: it has model=lenet, this run has model=alexnet" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("heals", [True, False], ids=["it heals", "it stays"])
def test_a_folder_that_takes_no_checkpoints_stops_no_training_and_the_exit_code_tells_of_the_last_one(
    heals: bool, tmp_path: Path
) -> None:
    flags = ("--ps=1", "--workers=1", "--num_batches=500", "--num_warmup_batches=0", "--save_model_steps=10")
    folder, away = tmp_path / "checkpoints", tmp_path / "away"
    with start_lockstep("bench", *SMALL_RUN, *flags, f"--train_dir={tmp_path}") as program:
        wait_until(lambda: list(folder.glob("step-*[!t]")), 60, "a checkpoint")
        folder.rename(away)
        folder.write_bytes(b"a file where the folder should be")
        program.wait_for("COULD NOT BE WRITTEN", 30)
        if heals:
            folder.unlink()
            away.rename(folder)
        done = program.wait(80)
    assert done.code == (0 if heals else 1), done.stderr
    assert ("THE LAST VERSION IS IN NO CHECKPOINT" in done.stderr) != heals
    assert done.stderr.count("COULD NOT BE WRITTEN") == 1
    assert "total images/sec" in done.stdout
    assert "Traceback" not in done.stderr
    assert not heals or list(folder.glob("step-00000500-*"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_ten_kills_change_no_bit() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "chaos.py"), "--seeds=1"], capture_output=True, text=True, timeout=590
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bits" in done.stdout
