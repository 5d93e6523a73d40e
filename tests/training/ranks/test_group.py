"""Ranks that meet over gloo: who is named if one does not come."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lockstep.training.ranks.group import CollectiveLost, MeetingPoint, _process_group
from lockstep.training.torch_private import c10d

PATIENCE = 0.5
HOME = "127.0.0.1"


@pytest.mark.parametrize("stage", ["gone before it tells its cores", "gone before it connects"])
def test_only_the_rank_that_did_not_come_is_missing(stage: str) -> None:
    store = c10d.HashStore()
    store.set_timeout(timedelta(seconds=PATIENCE))
    if stage == "gone before it connects":
        store.set("host/0", f"2 {HOME}")
    meeting = MeetingPoint(1, 2, HOME, HOME, HOME, 0, PATIENCE, "gloo")
    with pytest.raises(CollectiveLost, match="missing: /job:worker/replica:0/task:0 \\("):
        _process_group(meeting, store, "gloo")
