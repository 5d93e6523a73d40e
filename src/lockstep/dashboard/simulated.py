"""A simulated cluster as a source: to see the page with a thousand tasks, or with a fault, without any machine.

The simulator's clock is bound to the real one: a second of it never takes less than a second here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from lockstep.dashboard.frame import FrameMaker, Look
from lockstep.diagnose.asking import analysed
from lockstep.diagnose.evidence import Seen
from lockstep.diagnose.task_view import read_span
from lockstep.diagnose.views import TaskView
from lockstep.protocol.core.ids import Role, TaskId
from lockstep.protocol.core.journal import Record
from lockstep.runtime.trace.spans import parts_of_a_step, spans_of
from lockstep.sim.evidence import evidence_of
from lockstep.sim.faults import AnyFault
from lockstep.sim.planting import plant, with_faults
from lockstep.sim.scenario import NetworkProfile, Scenario, SecondsRange, TrainingProfile
from lockstep.sim.world import World

TASKS_ON_A_HOST = 8
STEPS = 1_000_000
FORWARD = SecondsRange(0.25, 0.45)
BACKWARD = SecondsRange(0.05, 0.1)
PER_TASK = 0.002
"""A large cluster takes longer steps here: each of its events costs this process time."""
LONGEST_ADVANCE = 2.0
"""Virtual seconds between two looks, however far the clock is behind."""


class SimulatedCluster:
    """``workers`` and ``servers`` of the real protocol under a virtual clock."""

    lives = True

    def __init__(self, workers: int, servers: int, faults: Sequence[AnyFault] = (), seed: int = 1) -> None:
        slower = PER_TASK * workers
        scenario = Scenario(
            seed=seed,
            workers=workers,
            servers=servers,
            network=NetworkProfile(latency=SecondsRange(0.0002, 0.002)),
            training=TrainingProfile(
                steps=STEPS,
                forward=SecondsRange(FORWARD.low + slower, FORWARD.high + slower),
                backward=BACKWARD,
                in_order=True,
            ),
            patience=1e9,
        )
        self._world = World(with_faults(scenario, faults))
        plant(self._world, faults)
        self._world.begin()
        self._began = time.monotonic()

    def maker(self) -> FrameMaker:
        shape = self._world.scenario.shape
        servers = f"{shape.servers} server{'s' if shape.servers != 1 else ''}"
        return FrameMaker("simulated", f"a simulated job of {servers} and {shape.workers} workers")

    def look(self) -> Look:
        self.advance(time.monotonic() - self._began)
        evidence = evidence_of(self._world)
        found = {name: self._dressed(seen) for name, seen in evidence.tasks.items()}
        return Look(found, analysed(found, "simulation"), self._world.agenda.now, time.time())

    def advance(self, until: float) -> None:
        """Play up to this virtual time, or as far as one look may."""
        agenda = self._world.agenda
        until = min(until, agenda.now + LONGEST_ADVANCE)
        while len(agenda) and agenda.next_at <= until and not self._world.over:
            agenda.run_next()

    def _dressed(self, seen: Seen) -> Seen:
        """With what a real task would tell besides: its host, and the parts of its steps."""
        task = TaskId.parse(seen.task)
        host = f"node{1 + task.index // TASKS_ON_A_HOST:03}" if task.role is Role.WORKER else f"ps{task.index}"
        monitor = None if seen.monitor is None else replace(seen.monitor, host=host)
        if seen.view is None:
            return replace(seen, monitor=monitor, address=f"{host}:4000")
        records = list(self._world.tasks[task].machine.journal)
        return replace(
            seen, monitor=monitor, address=f"{host}:4000", view=self._told(seen.view, host, task.role, records)
        )

    def _told(self, view: TaskView, host: str, role: Role, records: list[Record]) -> TaskView:
        spans = spans_of(records, role, self._world.agenda.now)
        begins = [one["begin"] for one in spans if one["part"] == spans[0]["part"]]
        lengths = sorted(after - before for before, after in zip(begins[1:], begins, strict=False))
        median = lengths[len(lengths) // 2] if lengths else 0.0
        return replace(
            view,
            host=host,
            usual=2 * median,
            parts=parts_of_a_step(records, role),
            spans=tuple(read_span(one) for one in spans),
            step_median=median,
            links={peer: replace(link, path="simulated") for peer, link in view.links.items()},
        )
