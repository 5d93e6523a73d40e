"""Looks at a job about once a second and keeps the newest frame for everybody who watches."""

from __future__ import annotations

import json
import threading
import time

from lockstep.dashboard.frame import Frame, FrameMaker
from lockstep.dashboard.sources import LookSource
from lockstep.transports.guard import Guard

EVERY_SECONDS = 1.0
REST = 0.5
"""Of the time that a look takes, at least this share passes before the next: a large cluster is asked less often."""


class LiveBoard:
    """One thread looks; any number of others wait for the next frame."""

    def __init__(self, source: LookSource) -> None:
        self._source = source
        self._maker: FrameMaker = source.maker()
        self._changed = threading.Condition()
        self._frame: Frame = {}
        self._points: list[list[float | None]] = []
        self._number = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dashboard", daemon=True)

    def start(self) -> None:
        """Look once, so that there is something to show, then go on in a thread of its own."""
        self.look()
        if self._source.lives:
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(10.0)

    def look(self) -> None:
        """One look, and its frame for all."""
        frame = self._maker.frame(self._source.look())
        points = list(self._maker.points)
        with self._changed:
            self._frame, self._points, self._number = frame, points, self._number + 1
            self._changed.notify_all()

    def wait_newer(self, number: int, seconds: float) -> tuple[Frame, int] | None:
        """The newest frame once it is newer than ``number``; None if none comes in that time."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > number or self._stop.is_set(), seconds)
            return (self._frame, self._number) if self._number > number else None

    @property
    def closed(self) -> bool:
        return self._stop.is_set()

    def first_message(self, frame: Frame) -> bytes:
        """For somebody who has seen nothing yet: with the whole curves."""
        return _message({**frame, "points": self._points})

    def next_message(self, frame: Frame) -> bytes:
        """For somebody who has seen the frame before: with the newest point of the curves."""
        points = self._points
        return _message({**frame, "point": points[-1] if points else None})

    def _run(self) -> None:
        guard = Guard("the dashboard")
        while not self._stop.is_set():
            began = time.monotonic()
            guard.passes(self.look)
            took = time.monotonic() - began
            self._stop.wait(max(EVERY_SECONDS - took, REST * took))


def _message(frame: Frame) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(frame, ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode() + b"\n\n"
