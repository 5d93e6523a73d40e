"""What a task prints of tasks that are missing."""

from __future__ import annotations

from lockstep.protocol.core.ids import server, worker
from lockstep.protocol.core.messages import MissingTask
from lockstep.protocol.core.timing import QUIET_SECONDS
from lockstep.runtime.task.missing_notices import MOST_SAID, MissingNotices


def notices(*, forming: bool = True) -> tuple[MissingNotices, list[str]]:
    said: list[str] = []
    return MissingNotices(worker(0), said.append, lambda: forming), said


def absent(index: int = 1, seconds: float = QUIET_SECONDS, attempts: int = 3) -> MissingTask:
    """One that has yet to join."""
    return MissingTask(str(worker(index)), f"192.0.2.{index}:2222", "nothing listens there", seconds, attempts)


LOST = MissingTask(str(server(0)), "", "its process has ended", 0.0, 0)


def test_a_task_that_does_not_join_is_named_after_a_while_and_not_again_at_once() -> None:
    missing, said = notices()
    missing.tell([absent(seconds=QUIET_SECONDS / 2)])
    missing.tell([absent(attempts=0)])
    assert said == []
    missing.tell([absent()])
    missing.tell([absent()])
    assert len(said) == 1
    assert "192.0.2.1:2222" in said[0]


def test_of_many_only_the_first_have_a_line_each() -> None:
    missing, said = notices()
    missing.tell([absent(index) for index in range(1, MOST_SAID + 3)])
    assert len(said) == MOST_SAID + 1
    assert "2 more" in said[-1]


def test_a_lost_member_is_named_at_once_and_once_more_after_it_has_come_back() -> None:
    missing, said = notices(forming=False)
    missing.tell([LOST])
    missing.tell([LOST])
    assert len(said) == 1
    missing.forget(server(0))
    missing.tell([LOST])
    assert len(said) == 2
