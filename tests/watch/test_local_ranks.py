"""Ranks of this host, by what they leave in the folder that lets us in: with processes that are no training."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from lockstep.watch import injected
from lockstep.watch.local_ranks import LocalRanks

DUMP = b'{"version": "2.10", "pg_config": {}, "entries": []}'


def test_a_rank_that_is_gone_is_not_asked_though_its_helpers_keep_its_socket_open(tmp_path: Path) -> None:
    with (
        subprocess.Popen(["sleep", "600"]) as process,
        socket.socket(socket.AF_UNIX) as kept,
        LocalRanks(tmp_path, [process.pid]) as ranks,
    ):
        files = tmp_path / f"rank0.{process.pid}"
        status = injected.STATUS.pack(injected.MARK, 7, 0.0, 0.0, injected.RUNNING, 0)
        Path(f"{files}.status").write_bytes(status.ljust(injected.STATUS_BYTES, b"\0"))
        Path(f"{files}.json").write_text(json.dumps({"rank": 0, "world": 1}))
        Path(f"{files}.dump").write_bytes(DUMP)
        kept.bind(f"{files}.sock")
        kept.listen()
        kept.setblocking(False)
        ranks.refresh()
        process.kill()
        wait_until(ranks.refresh, 20.0, "the death is seen")
        assert ranks.dumps() == {0: DUMP}
        with pytest.raises(BlockingIOError):
            kept.accept()
