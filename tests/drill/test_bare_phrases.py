"""Without any sentence the same is decided: every phrase is replaced by its bare name, and one drill per cause is run,
without servers where it makes sense: with them, ``test_drills.py`` runs every drill.

A drill judges cause, culprit, peer, tensor key, step, times and exit codes from values alone, so it must pass.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from helpers.programs import run_lockstep
from lockstep.drill.catalogue import DRILLS
from lockstep.drill.model import Drill
from lockstep.drill.ranks import applies

BARE = Path(__file__).parents[1] / "bare"
ONE_PER_CAUSE = {drill.cause: drill for drill in reversed(DRILLS) if drill.kind is not None}
pytestmark = pytest.mark.timed


@pytest.mark.drill
@pytest.mark.timeout(120)
@pytest.mark.parametrize("drill", ONE_PER_CAUSE.values(), ids=lambda d: d.name)
def test_without_sentences_a_drill_is_explained_as_with_them(drill: Drill) -> None:
    path = os.pathsep.join(filter(None, (str(BARE), os.environ.get("PYTHONPATH", ""))))
    shape = ("--ranks",) if applies(drill) else ()
    done = run_lockstep("drill", drill.name, "--json", *shape, timeout=100, environment={"PYTHONPATH": path})
    result = json.loads(done.stdout)
    if result["status"] == "skipped":
        pytest.skip(result["reason"])
    assert result["status"] == "passed", result
    # It was indeed without them: a wait that is for no tensor is told by the bare name of its phrase.
    assert "/" in result["key"] or result["key"] in ("", "waited_for"), result
