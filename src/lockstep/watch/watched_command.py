"""``lockstep watch -- COMMAND``: starts somebody's job, and watches it to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from lockstep.errors import EXIT_VERDICT, BadInput
from lockstep.protocol.core.ids import hex64
from lockstep.protocol.core.timing import OVERSTAY_SECONDS
from lockstep.runtime import processes
from lockstep.runtime.monitor.stack import find_py_spy
from lockstep.security.chosen import settle
from lockstep.watch import phrases
from lockstep.watch.asking import WatchDoor, findable
from lockstep.watch.entry import entered, entry_folder, kept_out
from lockstep.watch.hosts import AllRanks, Reporting
from lockstep.watch.job_metrics import JobBoard, showing
from lockstep.watch.local_ranks import LocalRanks
from lockstep.watch.reports import Reports
from lockstep.watch.spec import WatchSpec
from lockstep.watch.watcher import Watcher

TICK_SECONDS: Final = 0.25
SHOW_SECONDS: Final = 1.0
"""Between two looks for the metrics."""
NOBODY_SECONDS: Final = 60.0
"""After so long without a rank that has let us in, that is said."""
_PASSED_ON: Final = (*processes.STOP_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)


def run_watched(spec: WatchSpec, say: Callable[[str], None]) -> int:
    """Run the command to its end; returns its exit code, or 3 if it was ended because of a verdict."""
    with (
        processes.SignalInbox(_PASSED_ON, until_exit=True) as inbox,
        entry_folder() as folder,
        contextlib.closing(Reports(spec.folder, spec.pages, say)) as reports,
        findable(folder, hex64(reports.job), spec.command) as door,
        showing(spec.metrics, board := JobBoard(reports)),
    ):
        # From here on nothing may fail that a user could mend: the job would be left alone.
        try:
            child = subprocess.Popen(spec.command, env=entered(os.environ, folder))
        except OSError as error:
            raise BadInput(f"cannot start {spec.command[0]!r}: {error.strerror}.") from None
        variable = kept_out(os.environ)
        if variable:
            say(phrases.kept_out(variable))
        if find_py_spy() is None:
            say(phrases.no_py_spy())
        with LocalRanks(folder, [child.pid]) as ranks, contextlib.ExitStack() as others:
            return _Watching(spec, child, ranks, reports, inbox, door, board, others).run(quiet=bool(variable))


class _Watching:
    """The loop, from the start of the job to its end."""

    def __init__(
        self,
        spec: WatchSpec,
        child: subprocess.Popen[bytes],
        ranks: LocalRanks,
        reports: Reports,
        inbox: processes.SignalInbox,
        door: WatchDoor,
        board: JobBoard,
        others: contextlib.ExitStack,
    ) -> None:
        self._spec = spec
        self._child = child
        self._ranks = ranks
        self._reports = reports
        self._board = board
        self._shown = 0.0
        self._watcher = Watcher(ranks, reports, self._board.moved)
        self._inbox = inbox
        self._door = door
        self._say = reports.say
        self._others = others
        self._met = False
        self._all: AllRanks | None = None
        self._reporting: Reporting | None = None
        self._aborted = 0.0
        self._asked = False
        """Somebody has asked the job to end: what ends then is no fault."""

    def run(self, quiet: bool) -> int:
        began, ended = time.monotonic(), os.pidfd_open(self._child.pid)
        try:
            while self._child.poll() is None:
                descriptors = (self._inbox.fileno(), ended, self._door.fileno(), *self._ranks.descriptors)
                processes.wait_readable(descriptors, self._watcher.pause(TICK_SECONDS))
                self._pass_on()
                known, lost = len(self._ranks.numbers), self._ranks.refresh()
                if len(self._ranks.numbers) > known:
                    self._watcher.welcome()
                self._meet()
                self._tick(lost)
                self._door.serve(self._watcher.answer)
                self._show()
                if not quiet and not self._ranks.entered and time.monotonic() - began > NOBODY_SECONDS:
                    quiet = True
                    self._say(phrases.nobody_came_in(NOBODY_SECONDS))
                self._abort()
        finally:
            os.close(ended)
        self._ranks.refresh()
        self._show(at_once=True)
        code = self._child.returncode
        self._watcher.at_end(failed=code != 0 and not self._aborted and not self._asked)
        if self._aborted:
            return EXIT_VERDICT
        return code if code >= 0 else 128 - code

    def _show(self, *, at_once: bool = False) -> None:
        if self._spec.metrics and (at_once or time.monotonic() - self._shown >= SHOW_SECONDS):
            self._shown = time.monotonic()
            self._board.show(self._ranks.lives(), (self._all or self._ranks).steps())

    def _tick(self, lost: bool) -> None:
        if self._all is not None:
            lost = self._all.take_lost() or lost
        if not self._asked and not (self._reporting is not None and self._reporting.connected):
            self._watcher.tick(lost=lost)

    def _meet(self) -> None:
        """Once it is known that there are other hosts: the one with rank 0 speaks for all."""
        address = None if self._met else self._ranks.elsewhere()
        if address is None:
            return
        self._met = True
        where = (address[0], self._spec.port or address[1] + 1)
        settle(self._say)
        if 0 not in self._ranks.numbers:
            self._reporting = self._others.enter_context(contextlib.closing(Reporting(self._ranks, where, self._say)))
            return
        try:
            self._all = self._others.enter_context(contextlib.closing(AllRanks(self._ranks, where, self._say)))
        except OSError as error:
            self._say(phrases.cannot_listen(where[1], error.strerror or str(error)))
            return
        self._watcher = Watcher(self._all, self._reports, self._board.moved)

    def _pass_on(self) -> None:
        for signum in self._inbox.take():
            self._asked = self._asked or signum in processes.STOP_SIGNALS
            # A terminal has sent it to the job as well.
            if signum != signal.SIGINT or not sys.stdin or not sys.stdin.isatty():
                processes.send_signal(self._child.pid, signum)

    def _abort(self) -> None:
        if not self._spec.abort or self._watcher.ends is None or not self._watcher.reported:
            return
        if not self._aborted:
            self._aborted = time.monotonic()
            self._say(phrases.aborted(OVERSTAY_SECONDS))
            processes.send_signal(self._child.pid, signal.SIGTERM)
        elif time.monotonic() - self._aborted > OVERSTAY_SECONDS:
            for facts in processes.descendants(self._child.pid):
                processes.send_signal(facts.pid, signal.SIGKILL)
            processes.send_signal(self._child.pid, signal.SIGKILL)
