"""Rules about a worker that waits for its data."""

from __future__ import annotations

from lockstep.diagnose import phrases
from lockstep.diagnose.case import Proof, WaitCase
from lockstep.diagnose.evidence import is_worker
from lockstep.diagnose.views import MainView
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import Cause

_SHOWN = 4
"""Of this many processes that read, the state is shown."""


def _waits_for_data(case: WaitCase) -> MainView | None:
    main = None if case.view is None else case.view.main
    starved = main is not None and main.doing is Doing.INPUT and main.seconds >= case.evidence.patience
    return main if starved and is_worker(case.on) else None


def _arrives(case: WaitCase, main: MainView) -> bool:
    """Whether records still come, however slowly."""
    return main.input is not None and main.input.read > 0 and main.input.read_ago < case.evidence.patience


def input_starved(case: WaitCase) -> Proof | None:
    main = _waits_for_data(case)
    if main is None or _arrives(case, main):
        return None
    source = main.detail or phrases.its_input()
    what = phrases.has_no_data(case.on, case.step, source)
    said: tuple[str, ...] = (phrases.reads_since(case.on, source, main.seconds),)
    readers = () if main.input is None else main.input.readers
    said += tuple(phrases.reader_is(pid, state) for pid, state in readers[:_SHOWN])
    stopped = () if main.input is None else main.input.stopped
    if not stopped:
        return Proof(Cause.INPUT_STARVED, what, said, seconds=main.seconds, stack=main.stack)
    return Proof(
        Cause.INPUT_STARVED,
        phrases.input_is_stopped(case.on, case.step, stopped),
        said,
        seconds=main.seconds,
        stack=main.stack,
        remedy=phrases.resume_input(stopped),
    )


def slow_input(case: WaitCase) -> Proof | None:
    main = _waits_for_data(case)
    if main is None or main.input is None or not _arrives(case, main):
        return None
    found = main.input
    source = main.detail or phrases.its_input()
    rate, share = found.read / main.seconds, min(1.0, main.seconds / max(found.step_seconds, main.seconds))
    return Proof(
        Cause.STRAGGLER,
        phrases.input_is_slow(case.on, case.step, source, rate, share),
        (phrases.records_read(found.read, main.seconds, found.read_ago),),
        seconds=main.seconds,
        remedy=phrases.faster_input(),
    )
