"""The ranks of this host: who runs, who has died and how, and what can be seen of each from outside."""

from __future__ import annotations

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
    process_facts,
    uses_device,
)
from lockstep.runtime.watch.kernel_tcp import count_by_host
from lockstep.watch import injected
from lockstep.watch.process_ends import ProcessEnds
from lockstep.watch.ranks import RankProcess, RankStatus, dumps_of, ranks_below, recording_of, registered_in
from lockstep.watch.sights import Helper, RankSight, Vitality
from lockstep.watch.stack_reading import stacks_of, work_of

_SAMPLE_SECONDS: Final = 1.0
_SEARCH_SECONDS: Final = 2.0


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
        self._known: dict[int, RankProcess] = {}
        self._kept: dict[int, bytes] = {}
        self._deaths = ProcessEnds(self._keep_dumps)
        self._used: dict[int, _Used] = {}
        self._shares: dict[int, float] = {}
        self._lost = 0
        self._sampled = 0.0
        self._searched = 0.0

    @property
    def silent_hosts(self) -> tuple[str, ...]:
        """This one is not."""
        return ()

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self._deaths.close()
        for known in self._known.values():
            known.close()

    # -- who there is --

    @property
    def descriptors(self) -> list[int]:
        """Readable once a rank has ended."""
        return [self._deaths.descriptor]

    @property
    def numbers(self) -> list[int]:
        return sorted(self._known)

    @property
    def entered(self) -> bool:
        """Whether any rank has let us in."""
        return any(one.files is not None for one in self._known.values())

    def refresh(self) -> bool:
        """Look who has come and who has gone; whether somebody has gone in another way than a rank that is done.
        Cheap: it is called four times a second."""
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
            self._sample([one.pid for one in self._known.values() if self._deaths.of(one.pid) is None])
        before = self._lost
        if self._deaths.take():
            self._lost = sum(1 for one in self._known.values() if self._is_lost(one))
        return self._lost > before

    def search(self) -> None:
        """Find ranks that have not let us in, by the variables of their processes."""
        for rank, (pid, world) in ranks_below(self._tops).items():
            self.world = max(self.world, world)
            self._meet(rank, pid, None)

    def _meet(self, rank: int, pid: int, files: Path | None) -> None:
        known = self._known.get(rank)
        if known is not None and known.pid == pid:
            if files is not None and known.files is None:
                known.files = files
                self.world = max(self.world, known.facts().world)
            return
        if known is not None and self._deaths.of(known.pid) is None and (files is None or known.files is not None):
            return  # a program that the rank has started has inherited its variables
        facts = process_facts(pid)
        if known is not None and (facts is None or facts.dead):
            return  # an earlier life
        if known is not None:
            known.close()
        self._known[rank] = process = RankProcess(rank, pid, files)
        self._deaths.watch(pid)
        if files is not None:
            self.world = max(self.world, process.facts().world)

    # -- how far they have come --

    def steps(self) -> dict[int, tuple[int, float]]:
        """Of each rank that counts: how many steps it has made, and when the last ended."""
        found = {}
        for rank, known in self._known.items():
            if known.files is not None:
                status = known.status()
                found[rank] = (status.step, status.stepped)
        return found

    def elsewhere(self) -> tuple[str, int] | None:
        """Where rank 0 is, as the launcher told the ranks, if some of them are on other hosts."""
        for known in self._known.values():
            facts = known.facts()
            if facts.master and facts.port and 0 < facts.local < facts.world:
                return facts.master, facts.port
        return None

    @property
    def lost(self) -> int:
        """How many have ended in another way than a rank that is done."""
        return self._lost

    def _is_lost(self, process: RankProcess) -> bool:
        death = self._deaths.of(process.pid)
        if death is None or death.exit_code == 0:
            return False
        return death.exit_code is not None or process.status().leaving != injected.EXITING

    # -- what can be seen of them --

    def dumps(self) -> dict[int, bytes]:
        """What the recorders hold, or held when a rank died."""
        gone = {one.rank: one.left() for one in self._known.values() if self._deaths.of(one.pid) is not None}
        left = {rank: dump for rank, dump in gone.items() if dump}
        return {**self._kept, **left, **dumps_of(self._asked())}

    def _keep_dumps(self) -> None:
        """A launcher that has lost a rank ends the others soon, and what their recorders hold ends with them."""
        self._kept |= dumps_of(self._asked())

    def _asked(self) -> list[RankProcess]:
        """Those that can answer."""
        return [one for one in list(self._known.values()) if self._deaths.of(one.pid) is None and not _is_stopped(one)]

    def recordings(self) -> dict[int, Recording]:
        """Of all that answer."""
        dumps, now = self.dumps(), time.time()
        found = {rank: recording_of(dumps[rank], rank, now, self._known[rank].facts()) for rank in dumps}
        return {rank: recording for rank, recording in found.items() if recording is not None}

    def lives(self) -> list[RankSight]:
        """Who runs, and who has ended how: without a look into any of them."""
        processes = {known.pid: facts for known in self._known.values() if (facts := process_facts(known.pid))}
        return [self._alive(known, processes.get(known.pid)) for known in self._known.values()]

    def sights(self, *, all_stacks: bool) -> dict[int, RankSight]:
        """What is seen of each rank now. ``all_stacks``: of those that are in a collective, too."""
        dumps, taken = self.dumps(), time.time()  # first: a launcher that has lost a rank ends the others soon
        processes = {facts.pid: facts for facts in all_processes()}
        self._sample([pid for known in self._known.values() for pid in (known.pid, *_below(known, processes))])
        self._sampled = time.monotonic()
        facts = {rank: known.facts() for rank, known in self._known.items()}
        recordings = {rank: recording_of(dump, rank, taken, facts[rank]) for rank, dump in dumps.items()}
        wanted = [
            known.pid
            for rank, known in sorted(self._known.items(), key=lambda one: _is_open(recordings.get(one[0])))
            if self._deaths.of(known.pid) is None and (all_stacks or not _is_open(recordings.get(rank)))
        ]
        stacks = stacks_of(wanted)
        return {
            rank: replace(
                self._sight(known, processes, stacks.get(known.pid, ())),
                facts=facts[rank],
                dump=dumps.get(rank, b""),
                recording=recordings.get(rank),
            )
            for rank, known in self._known.items()
        }

    def _sight(
        self, process: RankProcess, processes: Mapping[int, ProcessFacts], stack: tuple[StackLine, ...]
    ) -> RankSight:
        alive = self._alive(process, processes.get(process.pid))
        here = alive.life is not Vitality.GONE
        return replace(
            alive,
            busy=self._shares.get(process.pid, 0.0),
            stack=stack,
            work=work_of(stack),
            on_device=alive.life is Vitality.RUNS and uses_device(process.pid),
            helpers=tuple(
                Helper(pid, processes[pid].stopped, processes[pid].dead, self._shares.get(pid, 0.0))
                for pid in _below(process, processes)
            ),
            links=count_by_host(process.pid) if here else {},
        )

    def _alive(self, process: RankProcess, facts: ProcessFacts | None) -> RankSight:
        """What the kernel says of it, and what it has written itself."""
        death = self._deaths.of(process.pid)
        entered = process.files is not None
        status = process.status() if entered else RankStatus()
        code = None if death is None else death.exit_code
        if death is not None and code is None and entered:
            code = {injected.EXITING: 0, injected.RAISED: 1}.get(status.leaving)
        life = Vitality.STOPPED if facts is not None and facts.stopped else Vitality.RUNS
        if death is not None or facts is None or facts.dead:
            life = Vitality.GONE
        return RankSight(
            rank=process.rank,
            host=self.host,
            pid=process.pid,
            life=life,
            state=facts.state if facts is not None else "",
            exit_code=code,
            ended=death.at if death is not None else time.time() if life is Vitality.GONE else 0.0,
            status=status,
            entered=entered,
            runnable=facts is not None and facts.wants_processor,
        )

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


def _below(process: RankProcess, processes: Mapping[int, ProcessFacts]) -> list[int]:
    """What a rank has started itself."""
    return [facts.pid for facts in processes.values() if facts.parent == process.pid]


def _is_stopped(process: RankProcess) -> bool:
    facts = process_facts(process.pid)
    return facts is not None and facts.stopped


def _is_open(recording: Recording | None) -> bool:
    return recording is not None and any(not call.over for call in recording.calls)
