"""Drills without servers: what strikes a server strikes the rank in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.programs import run_lockstep
from lockstep.drill.catalogue import DRILLS, find
from lockstep.drill.model import GRADIENT, PARAMETER, PS0, PS1, STEP, W0, W1, Drill
from lockstep.drill.ranks import NOT_WITHOUT_SERVERS, RANKS, applies, as_ranks
from lockstep.drill.run import run_drill
from lockstep.errors import BadInput
from lockstep.protocol.core.faults import DropMessage, DropTensor, Fault
from lockstep.protocol.core.ids import worker
from lockstep.runtime.processes import become_subreaper

QUICK = ("gradient-lost", "worker-killed")
APPLYING = [drill for drill in DRILLS if applies(drill)]
W2 = str(worker(2))
DOCUMENT = Path(__file__).parents[2] / "docs" / "drills.md"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", QUICK)
@pytest.mark.timed
def test_a_drill_without_servers_is_explained_in_time(name: str, tmp_path: Path) -> None:
    become_subreaper()
    result = run_drill(as_ranks(find(name)), str(tmp_path))
    assert result.status == "passed", result
    assert "ps" not in result.culprit + result.peer
    assert "server" not in (tmp_path / name / "report.txt").read_text()


@pytest.mark.drill
@pytest.mark.ranks
@pytest.mark.timeout(120)
@pytest.mark.parametrize("drill", [d for d in APPLYING if d.name not in QUICK], ids=lambda d: d.name)
@pytest.mark.timed
def test_every_drill_without_servers_is_explained_in_time(drill: Drill) -> None:
    become_subreaper()
    result = run_drill(as_ranks(drill))
    if result.status == "skipped":
        pytest.skip(result.reason)
    assert result.status == "passed", result


@pytest.mark.parametrize("drill", APPLYING, ids=lambda d: d.name)
def test_no_server_is_left_in_a_drill_of_ranks(drill: Drill) -> None:
    found = as_ranks(drill)
    assert (found.servers, found.workers) == (0, RANKS)
    text = repr((found.faults, found.around, found.pair))
    assert "/job:ps/" not in text
    assert len(found.faults) == len(drill.faults)
    assert (found.kind, found.cause, found.step) == (drill.kind, drill.cause, drill.step)


def test_most_drills_apply_and_the_rest_say_why_not() -> None:
    assert set(NOT_WITHOUT_SERVERS) <= {drill.name for drill in DRILLS}
    assert len(APPLYING) >= len(DRILLS) - 3
    for name, why in NOT_WITHOUT_SERVERS.items():
        with pytest.raises(BadInput, match="needs a server") as refused:
            as_ranks(find(name))
        assert why in str(refused.value)


@pytest.mark.parametrize(
    ("name", "fault", "key"),
    [
        ("gradient-lost", DropTensor(W1, W0, STEP, 0), GRADIENT + "0"),
        ("parameter-lost", DropTensor(W0, W1, STEP + 1, 0), PARAMETER + "0"),
        ("commit-lost", DropMessage(W0, W2, "Commit", STEP), ""),
        ("open-lost", DropMessage(W0, W1, "Open", STEP), GRADIENT),
    ],
)
def test_a_lost_tensor_is_one_that_these_two_ranks_exchange(name: str, fault: Fault, key: str) -> None:
    """Bucket 0 has its home on rank 0, which averages it for all."""
    found = as_ranks(find(name))
    assert found.faults == (fault,)
    assert found.key == key


def test_where_everybody_is_hit_all_ranks_are() -> None:
    names = tuple(str(worker(index)) for index in range(5))
    assert as_ranks(find("everything-paused"), 5).around.paused == names
    assert set(find("everything-paused").around.paused) == {PS0, W0, W1}


def test_a_drill_about_two_servers_needs_three_ranks() -> None:
    assert find("link-cut").servers == 2
    assert PS1 in find("swapped-indices").pair
    with pytest.raises(BadInput, match="'swapped-indices' needs at least --ranks=3"):
        as_ranks(find("swapped-indices"), 2)
    assert as_ranks(find("worker-killed"), 2).workers == 2
    larger = as_ranks(find("worker-killed"), 10)
    assert larger.startup_timeout > find("worker-killed").startup_timeout


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("worker-killed", "--ranks", "--ps=2"), "--ranks is a cluster without servers"),
        (("leftover-server", "--ranks"), "needs a server"),
        (("worker-killed", "--ranks=many"), "--ranks=many must be a whole number"),
    ],
)
def test_a_wrong_command_line_is_refused(words: tuple[str, ...], problem: str) -> None:
    done = run_lockstep("drill", *words, timeout=30)
    assert done.code == 2
    assert problem in done.stderr
