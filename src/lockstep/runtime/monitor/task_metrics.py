"""Every metric of a task, and how its monitor makes them from what it sees itself and from what the task last said.

``docs/metrics.md`` has one row for each. Labels are bounded: causes, parts, states and transports are short lists, and
a task names at most a few of its peers (``runtime/watch/metrics.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lockstep.runtime.monitor.exposition import MetricFamily, MetricKind, MetricPage

_PREFIX: Final = "lockstep_"


def _family(kind: MetricKind, name: str, meaning: str) -> MetricFamily:
    return MetricFamily(f"{_PREFIX}{name}", kind, meaning)


def _gauge(name: str, meaning: str) -> MetricFamily:
    return _family(MetricKind.GAUGE, name, meaning)


def _counter(name: str, meaning: str) -> MetricFamily:
    return _family(MetricKind.COUNTER, f"{name}_total", meaning)


# What the monitor knows, whatever the task does.
TASK_INFO: Final = _gauge("task_info", "Always 1: the job's number, the host and the version of the task.")
TASK_UP: Final = _gauge("task_up", "1 while the process of the task exists.")
TASK_ANSWERS: Final = _gauge("task_answers", "1 if the task answered this time; 0: its values are the last ones known.")
TASK_STOPPED: Final = _gauge("task_stopped", "1 while the kernel shows the process as stopped or frozen.")
ANSWERED: Final = _gauge("task_answered_timestamp_seconds", "When the task last answered, in seconds since 1970.")
SILENT: Final = _gauge("task_silent_seconds", "Seconds since the task last gave a sign of life.")
PHASE: Final = _gauge("task_phase_info", "Always 1: what the task is doing.")
EXIT_CODE: Final = _gauge("task_exit_code", "How the task ended; below 0: by this signal. Absent while it runs.")
INCARNATIONS: Final = _counter("incarnations", "How often the process of the task was started here.")
GOODPUT: Final = _gauge("goodput_ratio", "Share of the time since the start that went into steps which still count.")

# What the task says.
STEP: Final = _gauge("step", "The step the task is in.")
LAST_STEP: Final = _gauge("last_step_timestamp_seconds", "When a step last ended here, in seconds since 1970.")
LAST_STEP_SECONDS: Final = _gauge("last_step_seconds", "How long the last steps took, each; of watched jobs.")
STEPS: Final = _family(MetricKind.HISTOGRAM, "step_seconds", "How long steps took.")
PARTS: Final = _family(MetricKind.HISTOGRAM, "step_part_seconds", "How long the parts of steps took.")
EXAMPLES: Final = _counter("examples", "Examples taken for steps, where Lockstep hands them out.")
WAITED: Final = _counter("waiting_seconds", "Seconds waited in steps, by the peer that came last; the most waited for.")
WAITED_IN_ALL: Final = _counter("waiting_all_seconds", "Seconds waited in steps, for all peers.")
WAITING: Final = _gauge("open_wait_seconds", "How long the task waits for this peer now; the longest waits.")
LINKS: Final = _gauge("links", "Links of the task, by transport and state.")
LINK_DOWN: Final = _gauge("link_down", "Always 1: there is no link with this peer; those longest unheard.")
BYTES: Final = _counter("link_bytes", "Bytes of tensors over the links, by transport and direction.")
VERDICT: Final = _gauge("verdict_info", "The last report: 1 until a step ends here, then 0.")
VERDICTS: Final = _counter("verdicts", "Reports by cause.")
REJOINS: Final = _counter("rejoins", "Tasks that have come back as another incarnation, as this task has seen it.")
REPLICA: Final = _gauge("second_homes_whole", "1 if the loss of any one server would be survived now, 0 if not.")
CHECKPOINT: Final = _gauge(
    "checkpoint_timestamp_seconds", "When the newest checkpoint of this run was complete, in seconds since 1970."
)
REFUSED: Final = _counter("refused_callers", "Callers that the task has refused.")

FAMILIES: Final = tuple(one for one in dict(globals()).values() if isinstance(one, MetricFamily))


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenTask:
    """What a monitor sees of its task without asking it."""

    host: str
    version: str
    job: str
    phase: str
    up: bool
    stopped: bool
    silent: float
    exit_code: int | None
    starts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldByTask:
    """What the task last said of itself; ``goodput``: what its lives so far add up to."""

    fields: Mapping[str, Any]
    at: float
    now: bool
    goodput: float


def fill(page: MetricPage, seen: SeenTask, told: ToldByTask | None) -> MetricPage:
    """Everything that is known."""
    page.add(TASK_INFO, 1, job_id=seen.job, host=seen.host, version=seen.version)
    page.add(TASK_UP, int(seen.up))
    page.add(TASK_ANSWERS, int(told is not None and told.now))
    page.add(TASK_STOPPED, int(seen.stopped))
    page.add(SILENT, seen.silent)
    page.add(PHASE, 1, phase=seen.phase)
    page.add(INCARNATIONS, seen.starts)
    if seen.exit_code is not None:
        page.add(EXIT_CODE, seen.exit_code)
    if told is not None:
        page.add(ANSWERED, told.at)
        page.add(GOODPUT, told.goodput)
        _fill_with_words(page, told.fields)
    return page


def _fill_with_words(page: MetricPage, fields: Mapping[str, Any]) -> None:
    page.add(STEP, _whole(fields, "step"))
    _if_known(page, LAST_STEP, _seconds(fields, "last_step"))
    bounds = [float(bound) for bound in fields.get("bounds", ())]
    _add_histogram(page, STEPS, bounds, fields.get("steps"))
    for part, histogram in _items(fields, "parts"):
        _add_histogram(page, PARTS, bounds, histogram, part=part)
    _if_known(page, EXAMPLES, _whole(fields, "examples"))
    for peer, seconds in _items(fields, "waited"):
        page.add(WAITED, float(seconds), peer=peer)
    page.add(WAITED_IN_ALL, _seconds(fields, "waited_in_all"))
    for peer, seconds in _items(fields, "waits"):
        page.add(WAITING, float(seconds), peer=peer)
    for path, state, count in fields.get("links", ()):
        page.add(LINKS, int(count), path=str(path), state=str(state))
    for peer in fields.get("down", ()):
        page.add(LINK_DOWN, 1, peer=str(peer))
    for path, sent, received in fields.get("bytes", ()):
        page.add(BYTES, int(sent), path=str(path), direction="sent")
        page.add(BYTES, int(received), path=str(path), direction="received")
    if verdict := fields.get("verdict"):
        labels = {name: str(verdict[name]) for name in ("kind", "cause", "culprit", "peer")}
        page.add(VERDICT, int(bool(verdict["holds"])), **labels)
    for cause, count in _items(fields, "verdicts"):
        page.add(VERDICTS, int(count), cause=cause)
    page.add(REJOINS, _whole(fields, "rejoins"))
    if (whole := fields.get("replica")) is not None:
        page.add(REPLICA, int(bool(whole)))
    _if_known(page, CHECKPOINT, _seconds(fields, "checkpoint"))
    page.add(REFUSED, _whole(fields, "refused"))


def _add_histogram(page: MetricPage, family: MetricFamily, bounds: list[float], found: Any, **labels: str) -> None:
    if isinstance(found, Mapping):
        counts = [int(count) for count in found["counts"]]
        page.add_histogram(family, bounds, counts, float(found["seconds"]), **labels)


def _if_known(page: MetricPage, family: MetricFamily, value: float) -> None:
    """0 means that there is none, which is not the same as a value of 0."""
    if value:
        page.add(family, value)


def _items(fields: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    found = fields.get(name)
    if isinstance(found, Mapping):
        yield from ((str(key), value) for key, value in found.items())


def _whole(fields: Mapping[str, Any], name: str) -> int:
    return int(fields.get(name, 0))


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    return float(fields.get(name, 0.0))
