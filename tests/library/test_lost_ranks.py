"""A rank of a job without servers is killed, and comes back into its step, below ``lockstep run``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from helpers.marks import others_long
from helpers.once import lines_once
from helpers.ports import free_port
from helpers.programs import LOCKSTEP, Finished, Program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
PROGRAM = (*LOCKSTEP, "run", "--", sys.executable, str(Path(__file__).with_name("lost_rank_program.py")))
SECONDS = 400


def torchrun(ranks: int, *words: str) -> Finished:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--no-python", f"--nproc-per-node={ranks}")
    with Program((*launcher, f"--master-port={free_port()}", *PROGRAM, *words), ONE_THREAD) as program:
        return program.wait(SECONDS)


def results(text: str) -> list[str]:
    return sorted(re.findall(r"^rank \d: .*$", text, re.MULTILINE))


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """What so many ranks end with to which nothing happens."""

    def run(ranks: int) -> list[str]:
        done = torchrun(ranks, "--once=/nonexistent")
        assert done.code == 0, done
        return results(done.stdout)

    return lambda ranks: lines_once(tmp_path_factory, f"ranks-{ranks}", lambda: run(ranks))


@pytest.mark.parametrize(
    "case",
    others_long(
        [
            (2, "0:3:forward,0:6:backward"),
            (2, "1:3:begin,1:8:stepped"),
            (3, "0:0:forward,2:5:backward,0:9:stepped"),
            (3, "1:4:end,2:4:backward"),
            (2, "0:11:backward,0:0:backward"),
            (2, "1:11:end"),
        ],
        [(2, "0:3:forward,0:6:backward")],
    ),
)
def test_a_lost_rank_comes_back_with_the_same_bits_and_the_others_stay(
    case: tuple[int, str], undisturbed: Callable[[int], list[str]], tmp_path: Path
) -> None:
    ranks, deaths = case
    done = torchrun(ranks, f"--die={deaths}", f"--once={tmp_path}")
    assert done.code == 0, done
    assert len(list(tmp_path.iterdir())) == deaths.count(",") + 1
    assert results(done.stdout) == undisturbed(ranks)
    assert done.stderr.count("restarting /job:worker") == deaths.count(",") + 1
    assert "goes back to the newest checkpoint" not in done.stderr
    assert "has come back as a new incarnation" in done.stderr
    assert "verdict" not in done.stderr


@pytest.mark.long
def test_a_lost_rank_comes_back_where_gradients_travel_in_16_bits(
    undisturbed: Callable[[int], list[str]], tmp_path: Path
) -> None:
    """One in the middle of a step whose gradients the others send again, and one in a step that it makes once more."""
    narrow = "--wire_dtype=bfloat16"
    calm = torchrun(2, narrow, "--once=/nonexistent")
    done = torchrun(2, narrow, "--die=0:3:backward,1:8:stepped", f"--once={tmp_path}")
    assert (calm.code, done.code) == (0, 0), done
    assert len(list(tmp_path.iterdir())) == 2
    assert results(done.stdout) == results(calm.stdout) != undisturbed(2)


def test_a_lost_rank_of_a_list_comes_back(undisturbed: Callable[[int], list[str]], tmp_path: Path) -> None:
    hosts = f"--worker_hosts=127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    with ExitStack() as started:
        given = (hosts, "--job_name=worker", "--die=1:5:stepped", f"--once={tmp_path}")
        commands = [(*PROGRAM, *given, f"--task_index={index}") for index in range(2)]
        ranks = [started.enter_context(Program(command, ONE_THREAD)) for command in commands]
        done = [rank.wait(SECONDS) for rank in ranks]
    assert [one.code for one in done] == [0, 0], done
    assert results("".join(one.stdout for one in done)) == undisturbed(2)


def test_over_gloo_all_go_back_to_the_checkpoint_and_the_bits_stay(
    undisturbed: Callable[[int], list[str]], tmp_path: Path
) -> None:
    """Rank 0 keeps the group's store; the next job meets in another one. Two summands have one sum in any order."""
    kept = ("--backend=gloo", f"--train_dir={tmp_path / 'run'}", "--save_model_steps=2")
    (tmp_path / "once").mkdir()
    done = torchrun(2, "--die=0:5:forward", f"--once={tmp_path / 'once'}", *kept)
    assert done.code == 0, done
    assert results(done.stdout) == undisturbed(2)
    assert done.stderr.count("the job goes back to its newest checkpoint") == 1
