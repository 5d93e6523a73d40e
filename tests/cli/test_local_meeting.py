"""Where the workers of one command without servers meet: nobody else gets that port while they look for it."""

from __future__ import annotations

import errno
import socket

import pytest

from lockstep.cli.bench import start
from lockstep.protocol.core.ids import CHIEF
from lockstep.runtime.local_cluster.cluster import LocalClusterSpec

MEETING = "--collective_port="


def test_no_task_is_given_the_port_at_which_the_workers_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel chose it a second time, for a task: worker 0 then found its own monitor there."""
    seen: list[int] = []

    def look(spec: LocalClusterSpec) -> int:
        [port] = [int(word.removeprefix(MEETING)) for word in spec.command(CHIEF, [], []) if word.startswith(MEETING)]
        with socket.socket() as other, pytest.raises(OSError) as refused:
            other.bind(("127.0.0.1", port))
        assert refused.value.errno == errno.EADDRINUSE
        seen.append(port)
        return 0

    monkeypatch.setattr("lockstep.runtime.local_cluster.cluster.run_local_cluster", look)
    assert start(["--workers=2", "--variable_update=collective_all_reduce", "--device=cpu"], ["lockstep"]) == 0
    assert len(seen) == 1
