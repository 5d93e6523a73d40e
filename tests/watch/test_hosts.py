"""Watchers of two hosts find each other, prove themselves, and one speaks for both; without torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flight.jobs import PaperJob, steps
from fuzz.watch_targets import SIGHT
from helpers.ports import free_port
from helpers.waiting import wait_until
from lockstep.security.chosen import choose
from lockstep.watch import injected
from lockstep.watch.hosts import AllRanks, ClockGap, Reporting
from lockstep.watch.local_ranks import LocalRanks
from lockstep.watch.sight_codec import SightsError, sights_from_json, sights_to_json

SECONDS = 30.0


def test_what_a_watcher_sees_arrives_as_it_was_sent() -> None:
    (found,) = sights_from_json(sights_to_json({1: SIGHT}), now=5.0).values()
    assert found.recording is not None
    assert found.recording.members == {"0": (0, 1)}
    assert {name: getattr(found, name) for name in SIGHT.__slots__ if name != "recording"} == {
        name: getattr(SIGHT, name) for name in SIGHT.__slots__ if name != "recording"
    }


@pytest.mark.parametrize("data", [b"", b"{}x", b"[1]", b'[{"rank": 1}]'])
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(SightsError):
        sights_from_json(data, now=5.0)


def test_a_clock_that_is_ahead_makes_nobody_late() -> None:
    gap = ClockGap()
    gap.learn(theirs=107.0, ours=100.2, took=0.4)
    gap.learn(theirs=190.0, ours=100.2, took=0.5)
    assert round(gap.ahead, 6) == 7.0, "the quicker answer is the better one"
    recording = PaperJob({"0": (0, 1)}, {rank: [*steps(2)] for rank in range(2)}).run().recordings()[1]
    both = zip(gap.ours(recording).calls, recording.calls, strict=True)
    assert {round(shifted.created - call.created, 6) for shifted, call in both} == {-7.0}


@contextlib.contextmanager
def host(name: str, folder: Path, rank: int, step: int) -> Iterator[LocalRanks]:
    """A host with one rank, which is this process."""
    folder.mkdir()
    data = bytearray(injected.STATUS_BYTES)
    injected.STATUS.pack_into(data, 0, injected.MARK, step, 1.0, time.time(), injected.RUNNING, 0)
    (folder / f"rank{rank}.{os.getpid()}.status").write_bytes(data)
    (folder / f"rank{rank}.{os.getpid()}.json").write_text('{"world": 2, "local": 1, "master": "::1", "port": "1"}')
    with LocalRanks(folder, []) as ranks:
        ranks.host = name
        ranks.refresh()
        yield ranks


@pytest.mark.slow
def test_the_one_beside_rank_0_speaks_for_all(tmp_path: Path) -> None:
    said: list[str] = []
    address = ("127.0.0.1", free_port())
    with host("a", tmp_path / "a", 0, 5) as first, host("b", tmp_path / "b", 1, 6) as second:
        assert first.elsewhere() == ("::1", 1)
        with contextlib.closing(AllRanks(first, address, said.append)) as every:
            reporting = Reporting(second, address, said.append)
            wait_until(lambda: len(every.steps()) == 2, SECONDS, "both hosts tell their steps")
            assert reporting.connected
            assert {rank: step for rank, (step, _) in every.steps().items()} == {0: 5, 1: 6}
            assert every.world == 2
            assert {rank: one.host for rank, one in every.sights(all_stacks=False).items()} == {0: "a", 1: "b"}
            assert every.silent_hosts == ()
            reporting.close()
            wait_until(
                lambda: every.steps() and every.sights(all_stacks=False) and every.silent_hosts == ("b",),
                SECONDS,
                "the other host is silent",
            )
    assert said == ["the watcher on b has joined, with rank 1"]


def test_a_watcher_with_another_key_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    address = ("127.0.0.1", free_port())
    with (
        host("a", tmp_path / "a", 0, 5) as first,
        host("b", tmp_path / "b", 1, 6) as second,
        contextlib.closing(AllRanks(first, address, lambda _: None)) as every,
    ):
        key = tmp_path / "key"
        key.write_text("ab" * 32)
        key.chmod(0o600)
        monkeypatch.setenv("LOCKSTEP_KEY_FILE", "")
        choose(key_file=key)
        with contextlib.closing(Reporting(second, address, said.append)) as reporting:
            wait_until(lambda: said, SECONDS, "it is said")
            assert not reporting.connected
        assert set(every.steps()) == {0}
    assert "key" in said[0]
