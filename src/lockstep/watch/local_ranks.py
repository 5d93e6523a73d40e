"""The ranks of this host: who runs, who has died and how, and what can be seen of each from outside."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from lockstep.flight.recording import Recording, StackLine
from lockstep.runtime.processes import (
    ProcessFacts,
    all_processes,
    exit_code_unreaped,
    process_facts,
    uses_device,
    wait_readable,
)
from lockstep.runtime.watch.kernel_tcp import count_by_host
from lockstep.watch import injected
from lockstep.watch.ranks import RankProcess, RankStatus, dumps_of, ranks_below, recording_of, registered_in
from lockstep.watch.sights import Helper, RankSight, Vitality
from lockstep.watch.stack_reading import stacks_of, work_of

_SAMPLE_SECONDS: Final = 1.0
_SEARCH_SECONDS: Final = 2.0


@dataclass(slots=True)
class _Known:
    process: RankProcess
    descriptor: int
    """Readable once the process has ended; -1: it had ended before."""
    ended: float = 0.0
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class _Used:
    """How much of a processor a process had used, and when."""

    at: float
    seconds: float


class LocalRanks:
    """``folder``: where ranks let us in; None: they were running before. ``tops``: what was started here."""

    def __init__(self, folder: Path | None, tops: Iterable[int]) -> None:
        self.host = socket.gethostname()
        self.world = 0
        self.lock = threading.RLock()
        """A host that reports to another answers questions beside its own loop."""
        self._folder = folder
        self._tops = tuple(tops)
        self._known: dict[int, _Known] = {}
        self._used: dict[int, _Used] = {}
        self._shares: dict[int, float] = {}
        self._sampled = 0.0
        self._searched = 0.0

    @property
    def silent_hosts(self) -> tuple[str, ...]:
        """This one is not."""
        return ()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        for known in self._known.values():
            self._forget(known)

    # -- who there is --

    @property
    def descriptors(self) -> list[int]:
        """Each is readable once a rank has ended."""
        return [one.descriptor for one in self._known.values() if one.descriptor >= 0 and not one.ended]

    @property
    def numbers(self) -> list[int]:
        return sorted(self._known)

    @property
    def entered(self) -> bool:
        """Whether any rank has let us in."""
        return any(one.process.files is not None for one in self._known.values())

    def refresh(self) -> bool:
        """Look who has come and who has gone; whether somebody has gone. Cheap: it is called four times a second."""
        with self.lock:
            return self._refresh()

    def _refresh(self) -> bool:
        if self._folder is not None:
            for rank, pid in registered_in(self._folder):
                self._meet(rank, pid, self._folder / f"rank{rank}.{pid}")
        now = time.monotonic()
        if now - self._searched >= _SEARCH_SECONDS and (not self.world or len(self._known) < self.world):
            self._searched = now
            self.search()
        if now - self._sampled >= _SAMPLE_SECONDS:
            self._sampled = now
            self._sample([one.process.pid for one in self._known.values() if not one.ended])
        return self._bury()

    def search(self) -> None:
        """Find ranks that have not let us in, by the variables of their processes."""
        for rank, (pid, world) in ranks_below(self._tops).items():
            self.world = max(self.world, world)
            self._meet(rank, pid, None)

    def _meet(self, rank: int, pid: int, files: Path | None) -> None:
        known = self._known.get(rank)
        if known is not None and known.process.pid == pid:
            if files is not None and known.process.files is None:
                known.process.files = files
                self.world = max(self.world, known.process.facts().world)
            return
        if known is not None and not known.ended and files is None:
            return  # a helper of that rank, which has inherited its variables
        facts = process_facts(pid)
        if known is not None and (facts is None or facts.dead):
            return  # an earlier life
        if known is not None:
            self._forget(known)
        process = RankProcess(rank, pid, files)
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            descriptor = -1
        self._known[rank] = _Known(process, descriptor)
        if files is not None:
            self.world = max(self.world, process.facts().world)

    @staticmethod
    def _forget(known: _Known) -> None:
        if known.descriptor >= 0:
            os.close(known.descriptor)
        known.process.close()

    def _bury(self) -> bool:
        ready = wait_readable(self.descriptors, 0)
        found = False
        for known in self._known.values():
            if not known.ended and (known.descriptor in ready or known.descriptor < 0):
                known.ended, known.exit_code = time.time(), exit_code_unreaped(known.process.pid)
                found = True
        return found

    # -- how far they have come --

    def steps(self) -> dict[int, tuple[int, float]]:
        """Of each rank that counts: how many steps it has made, and when the last ended."""
        found = {}
        for rank, known in self._known.items():
            if known.process.files is not None:
                status = known.process.status()
                found[rank] = (status.step, status.stepped)
        return found

    def elsewhere(self) -> tuple[str, int] | None:
        """Where rank 0 is, as the launcher told the ranks, if some of them are on other hosts."""
        for known in self._known.values():
            facts = known.process.facts()
            if facts.master and facts.port and 0 < facts.local < facts.world:
                return facts.master, facts.port
        return None

    @property
    def gone(self) -> int:
        """How many have ended."""
        return sum(1 for one in self._known.values() if one.ended)

    # -- what can be seen of them --

    def dumps(self) -> dict[int, bytes]:
        return dumps_of([one.process for one in self._known.values() if not self._is_stopped(one)])

    def recordings(self) -> dict[int, Recording]:
        """Of all that answer."""
        dumps, now = self.dumps(), time.time()
        found = {rank: recording_of(dumps[rank], rank, now, self._known[rank].process.facts()) for rank in dumps}
        return {rank: recording for rank, recording in found.items() if recording is not None}

    def sights(self, *, all_stacks: bool) -> dict[int, RankSight]:
        """What is seen of each rank now. ``all_stacks``: of those that are in a collective, too."""
        dumps, taken = self.dumps(), time.time()  # first: a launcher that has lost a rank ends the others soon
        processes = {facts.pid: facts for facts in all_processes()}
        self._sample([pid for known in self._known.values() for pid in (known.process.pid, *_below(known, processes))])
        self._sampled = time.monotonic()
        facts = {rank: known.process.facts() for rank, known in self._known.items()}
        recordings = {rank: recording_of(dump, rank, taken, facts[rank]) for rank, dump in dumps.items()}
        wanted = [
            known.process.pid
            for rank, known in sorted(self._known.items(), key=lambda one: _is_open(recordings.get(one[0])))
            if not known.ended and (all_stacks or not _is_open(recordings.get(rank)))
        ]
        stacks = stacks_of(wanted)
        return {
            rank: replace(
                self._sight(known, processes, stacks.get(known.process.pid, ())),
                facts=facts[rank],
                dump=dumps.get(rank, b""),
                recording=recordings.get(rank),
            )
            for rank, known in self._known.items()
        }

    def _sight(self, known: _Known, processes: Mapping[int, ProcessFacts], stack: tuple[StackLine, ...]) -> RankSight:
        process = known.process
        facts = processes.get(process.pid)
        entered = process.files is not None
        status = process.status() if entered else RankStatus()
        code = known.exit_code
        if known.ended and code is None and entered:
            code = {injected.EXITING: 0, injected.RAISED: 1}.get(status.leaving)
        life = Vitality.STOPPED if facts is not None and facts.stopped else Vitality.RUNS
        if known.ended or facts is None or facts.dead:
            life = Vitality.GONE
        return RankSight(
            rank=process.rank,
            host=self.host,
            pid=process.pid,
            life=life,
            state=facts.state if facts is not None else "",
            exit_code=code,
            ended=known.ended or (time.time() if life is Vitality.GONE else 0.0),
            status=status,
            entered=entered,
            busy=self._shares.get(process.pid, 0.0),
            stack=stack,
            work=work_of(stack),
            on_device=life is Vitality.RUNS and uses_device(process.pid),
            helpers=tuple(
                Helper(pid, processes[pid].stopped, processes[pid].dead, self._shares.get(pid, 0.0))
                for pid in _below(known, processes)
            ),
            links=count_by_host(process.pid) if life is not Vitality.GONE else {},
        )

    def _is_stopped(self, known: _Known) -> bool:
        facts = process_facts(known.process.pid)
        return facts is not None and facts.stopped

    def _sample(self, pids: Iterable[int]) -> None:
        now = time.monotonic()
        for pid in pids:
            facts = process_facts(pid)
            if facts is None:
                continue
            before = self._used.get(pid)
            if before is not None and now - before.at < _SAMPLE_SECONDS / 2:
                continue
            self._used[pid] = _Used(now, facts.cpu_seconds)
            if before is not None:
                self._shares[pid] = (facts.cpu_seconds - before.seconds) / (now - before.at)


def _below(known: _Known, processes: Mapping[int, ProcessFacts]) -> list[int]:
    """What a rank has started itself."""
    return [facts.pid for facts in processes.values() if facts.parent == known.process.pid]


def _is_open(recording: Recording | None) -> bool:
    return recording is not None and any(not call.over for call in recording.calls)
