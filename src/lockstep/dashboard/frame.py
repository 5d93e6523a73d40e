"""One moment of a job as plain JSON values: what the page and the terminal show. The page draws, and decides nothing.

A ``FrameMaker`` keeps what a single moment cannot tell: rates, and the curves of throughput and loss.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from lockstep.dashboard.helping_commands import helping_command
from lockstep.dashboard.links import LinkRates
from lockstep.dashboard.names import short
from lockstep.dashboard.task_rows import PARTS, Light, light_of, task_rows
from lockstep.dashboard.wait_graph import wait_graph
from lockstep.diagnose import phrases
from lockstep.diagnose.evidence import Seen, is_worker
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.diagnose.views import TaskView
from lockstep.version import __version__

Frame = dict[str, Any]

POINTS = 900
"""Of each curve; with a look every second, a quarter of an hour."""
RATE_SECONDS = 5.0
"""A rate is that of the last few seconds: single steps may take longer than the time between two looks."""
LOG_LENGTH = 50
HOLD_SECONDS = 6.0


class Mood(StrEnum):
    """How the job is, in one word."""

    HEALTHY = "healthy"
    STARTING = "starting"
    PARTIAL = "partial"
    """Not all tasks answer, and nobody waits for them yet."""
    WARNING = "warning"
    """Something is slow; it goes on by itself."""
    NOTICE = "notice"
    """Something is stuck, and it is not proven why."""
    STUCK = "stuck"
    ENDED = "ended"
    GONE = "gone"
    """Nobody answers any more."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a job has found. ``now``: on the clock that rates are measured with."""

    found: Mapping[str, Seen]
    diagnosis: Diagnosis
    now: float
    time: float
    """Seconds since 1970, for people."""


class FrameMaker:
    """Makes frames of looks at one job, oldest first."""

    def __init__(self, kind: str, words: str) -> None:
        self._source = {"kind": kind, "words": words}
        self._links = LinkRates()
        self._marks: deque[tuple[float, int]] = deque()
        self.points: deque[list[float | None]] = deque(maxlen=POINTS)
        """[time, steps per second, examples per second, loss, seconds of a step]; None: not known."""
        self._log: deque[dict[str, Any]] = deque(maxlen=LOG_LENGTH)
        self._answers: dict[str, tuple[float, Seen]] = {}
        self._spans: dict[str, tuple[float, list[list[Any]]]] = {}
        self._last: Frame = {}
        self._number = 0

    def frame(self, look: Look) -> Frame:
        """The next frame; ``points`` of the maker has the curves up to it."""
        self._number += 1
        answering = [seen for seen in look.found.values() if seen.view is not None or seen.monitor is not None]
        if not answering and self._last:
            return self._after_the_end(look)
        diagnosis = look.diagnosis
        links = self._links.look(look.found, look.now)
        look = replace(look, found=self._held(look))
        views = [seen.view for seen in look.found.values() if seen.view is not None]
        mood = mood_of(look.found, diagnosis)
        verdict = None if diagnosis.verdict is None else verdict_fields(diagnosis.verdict, look.found)
        self._note(mood, verdict, look.time)
        numbers = self._numbers(look, views)
        self._last = {
            "number": self._number,
            "time": look.time,
            "version": __version__,
            "source": self._source,
            "job": diagnosis.job,
            "mood": mood.value,
            "summary": diagnosis.summary,
            "ends": diagnosis.ends,
            "verdict": verdict,
            "also": [verdict_fields(one, look.found) for one in diagnosis.also[:5]],
            "log": list(self._log),
            "numbers": numbers,
            "parts": [part.value for part in PARTS],
            "tasks": self._tasks(look),
            "graph": dataclasses.asdict(wait_graph(look.found, diagnosis)),
            "links": links,
        }
        return self._last

    def _held(self, look: Look) -> dict[str, Seen]:
        """On a busy host a task may miss one look: what it said a moment ago is shown, unless it is known to be stuck.

        The diagnosis knows nothing of this: it judges what was found.
        """
        culprits = _culprits(look.diagnosis)
        held = {}
        for name, seen in look.found.items():
            if seen.view is not None:
                self._answers[name] = (look.now, seen)
            then, answer = self._answers.get(name, (-HOLD_SECONDS, seen))
            stands = seen.monitor is None or seen.monitor.exited or seen.monitor.stopped >= 0
            late = seen.view is None and not stands and name not in culprits and look.now - then < HOLD_SECONDS
            held[name] = answer if late else seen
        return held

    def _tasks(self, look: Look) -> list[dict[str, Any]]:
        """The last steps of a task that does not answer are those that it had before, by now older."""
        rows = task_rows(look.found, _culprits(look.diagnosis))
        for row in rows:
            answered = self._answers.get(row["name"], (look.now, None))[0] == look.now
            if "spans" in row and answered:
                self._spans[row["name"]] = (look.now, row["spans"])
            elif row["name"] in self._spans:
                then, spans = self._spans[row["name"]]
                ago = look.now - then
                row["spans"] = [[one[0], round(one[1] + ago, 4), round(one[2] + ago, 4), *one[3:]] for one in spans]
        return rows

    def _after_the_end(self, look: Look) -> Frame:
        """What was seen last stays, with the time since when nobody answers."""
        if self._last["mood"] != Mood.GONE:
            self._last = {**self._last, "mood": Mood.GONE.value, "gone_since": look.time}
        self._last = {**self._last, "number": self._number, "asked": look.time}
        return self._last

    def _numbers(self, look: Look, views: list[TaskView]) -> dict[str, Any]:
        step = max((view.step for view in views), default=-2)
        workers = [view for view in views if is_worker(view.task)]
        told = max(workers, key=lambda view: view.loss_step, default=None)
        batch = max((view.batch for view in workers), default=0)
        rate = self._steps_per_second(look.now, step)
        median = max((view.step_median for view in views), default=0.0)
        loss = None if told is None else told.loss
        examples = None if not batch or rate is None else rate * batch
        self.points.append([round(look.time, 2), rate, examples, loss, median or None])
        return {
            "step": step,
            "rate": rate,
            "examples": examples,
            "loss": loss,
            "median": median or None,
            "answering": len(views),
            "tasks": len(look.found),
        }

    def _steps_per_second(self, now: float, step: int) -> float | None:
        marks = self._marks
        if marks and step < marks[-1][1]:  # the job went back to a checkpoint
            marks.clear()
        marks.append((now, step))
        while len(marks) > 2 and marks[1][0] <= now - RATE_SECONDS:
            marks.popleft()
        seconds = now - marks[0][0]
        return (step - marks[0][1]) / seconds if seconds > 0 and marks[0][1] >= 0 else None

    def _note(self, mood: Mood, verdict: dict[str, Any] | None, time: float) -> None:
        """What was found, once for as long as it lasts."""
        open_one = self._log[-1] if self._log and self._log[-1]["until"] is None else None
        what = None if verdict is None else (verdict["cause"], verdict["culprit"])
        if open_one is not None and what != (open_one["cause"], open_one["culprit"]):
            open_one["until"] = time
            open_one = None
        if verdict is not None and open_one is None:
            self._log.append(
                {
                    "time": time,
                    "until": None,
                    "mood": mood.value,
                    **{name: verdict[name] for name in ("cause", "culprit", "title", "stuck", "what")},
                }
            )


def mood_of(found: Mapping[str, Seen], diagnosis: Diagnosis) -> Mood:
    """From values only; the words are made elsewhere."""
    verdict = diagnosis.verdict
    lights = {light_of(seen) for seen in found.values()}
    if lights <= {Light.ENDED, Light.GONE} or any(
        seen.view is not None and seen.view.ended is not None for seen in found.values()
    ):
        return Mood.ENDED
    if verdict is not None:
        if verdict.warning:
            return Mood.WARNING
        return Mood.STUCK if verdict.proven else Mood.NOTICE
    if Light.STARTING in lights:
        return Mood.STARTING
    all_answer = all(seen.view is not None for seen in found.values())
    return Mood.HEALTHY if diagnosis.healthy or all_answer else Mood.PARTIAL


def verdict_fields(verdict: Verdict, found: Mapping[str, Seen]) -> dict[str, Any]:
    """A verdict in words, with its stack and a command to copy."""
    seen = found.get(verdict.culprit)
    return {
        "cause": verdict.cause.value,
        "title": phrases.cause_title(verdict.cause, verdict.culprit) if verdict.proven else phrases.cause_unknown(),
        "proven": verdict.proven,
        "warning": verdict.warning,
        "culprit": short(verdict.culprit),
        "peer": short(verdict.peer) if verdict.peer else "",
        "host": verdict.host,
        "pid": verdict.pid,
        "stuck": verdict.stuck,
        "what": verdict.what,
        "remedy": verdict.remedy,
        "command": helping_command(verdict, "" if seen is None else seen.address, socket.gethostname()),
        "key": verdict.key,
        "names": list(verdict.names),
        "step": verdict.step,
        "seconds": round(verdict.seconds, 1),
        "left": round(verdict.left, 1),
        "evidence": list(verdict.evidence),
        "stack": list(verdict.stack),
    }


def _culprits(diagnosis: Diagnosis) -> frozenset[str]:
    verdicts = [*diagnosis.also] if diagnosis.verdict is None else [diagnosis.verdict, *diagnosis.also]
    return frozenset(verdict.culprit for verdict in verdicts)
