"""``lockstep why``: asks a live cluster why it hangs, from any machine, or reads the files of one that has ended."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.key_flags import KEY_FLAGS_HELP
from lockstep.errors import BadInput, HelpAsked
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.reach import MAY_BE_LATE
from lockstep.protocol.core.timing import (
    PROBE_ALL_SECONDS,
    WHY_AGAIN_SECONDS,
    WHY_ASK_SECONDS,
    WHY_BUDGET_SECONDS,
)
from lockstep.runtime.running_jobs import LocalJob
from lockstep.security.chosen import settle
from lockstep.terminal import say, shown

if TYPE_CHECKING:
    from lockstep.diagnose.verdict import Diagnosis
    from lockstep.watch.asking import ListedWatch

_HELP = """\
lockstep why: who waits for whom, for which tensor, and why.

  lockstep why               ask your job on this host, also one under 'lockstep watch';
                             if several run, list them; if none runs, read the newest run
                             folder that you left here
  lockstep why HOST:PORT     ask the cluster that this task belongs to (any task will do)
  lockstep why JOB           ask your job of this number, or read its run folder
  lockstep why FOLDER        read the files of a run that has ended, or the dumps that
                             torch's flight recorder wrote for anybody's job

  --alive                    ask only the monitor, at HOST:PORT or of the task that
                             TF_CONFIG names: 0 if it answers, for probes of a pod
  --watch                    ask again every two seconds, until Ctrl-C
  --json                     one JSON object instead of text
{key_flags}
Exit codes: 0 healthy, 3 something is stuck or has ended, 2 bad input.
"""

EXIT_STANDS_STILL = 3
WATCH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Asked:
    target: str
    watch: bool
    as_json: bool
    only_alive: bool = False


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asked = _parse(argv)
    if asked.only_alive:
        settle(say)
        return _ask_monitor(asked.target or _own_address(os.environ))
    if _is_address(asked.target):
        settle(say)
        return _ask_address(asked)
    if not asked.target or (os.sep not in asked.target and not Path(asked.target).is_dir()):
        jobs, watched = _running_jobs(asked.target), _watched_jobs(asked.target)
        if len(jobs) + len(watched) > 1:
            raise BadInput(_which_one(jobs, watched))
        if watched:
            return _ask_watcher(watched[0], asked)
        if jobs:
            if not asked.as_json:
                say(f"asking {jobs[0].words()}")
            return _answers(dict(jobs[0].job.cluster), asked, time.monotonic())
        asked = replace(asked, target=_newest_folder(asked.target))
    return _read_files(asked)


def _parse(argv: Sequence[str]) -> _Asked:
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP.format(key_flags=KEY_FLAGS_HELP))
    targets = [word for word in argv if not word.startswith("-")]
    unknown = [word for word in argv if word.startswith("-") and word not in ("--watch", "--json", "--alive")]
    if unknown:
        raise BadInput(f"'lockstep why' has no flag {unknown[0]!r}; it has --watch, --json and --alive.")
    if len(targets) > 1:
        raise BadInput("'lockstep why' takes one address or one folder; any task of the cluster will do.")
    asked = _Asked(targets[0] if targets else "", "--watch" in argv, "--json" in argv, "--alive" in argv)
    if asked.only_alive and (asked.watch or asked.as_json or (asked.target and not _is_address(asked.target))):
        raise BadInput("'lockstep why --alive' takes an address like HOST:PORT, or nothing, and no other flag.")
    return asked


def _newest_folder(name: str) -> str:
    """The newest run folder, or the one of the job with this number."""
    from lockstep.runtime.watch.run_folder import run_folders

    folders = [folder for folder in run_folders() if not name or folder.name.startswith(name)]
    if not folders and name:
        raise BadInput(
            f"{name} is neither an address like HOST:PORT, nor a folder, nor the number of a job of yours on this "
            "host; 'lockstep why' alone lists those that run."
        )
    if not folders:
        raise BadInput(
            "no job of yours runs on this host, and no run folder of yours was found; write 'lockstep why HOST:PORT' "
            "with the address of any task, or the folder that the job named at its end."
        )
    return str(folders[0])


def _is_address(target: str) -> bool:
    host, _, port = target.rpartition(":")
    return bool(host) and os.sep not in target and port.isdecimal()


# -- one monitor --


def _own_address(environ: Mapping[str, str]) -> str:
    """Where the task listens whose pod this is."""
    from lockstep.runtime.startup.cluster import ClusterSpec
    from lockstep.runtime.startup.own_name import with_own_address
    from lockstep.runtime.startup.tf_config import read_tf_config

    found = read_tf_config(environ)
    if found is None or found.evaluates:
        raise BadInput("TF_CONFIG names no task here; write 'lockstep why --alive HOST:PORT'.")
    ps_hosts, worker_hosts = found.lists()
    spec = ClusterSpec(ps_hosts=ps_hosts, worker_hosts=worker_hosts, task=found.task)
    return str(with_own_address(spec, environ).listen_address())


def _ask_monitor(address: str) -> int:
    """A monitor that answers is well: what becomes of its task, it and the others decide."""
    from lockstep.transports.control.monitor_query import query_monitor

    answer = query_monitor(address)
    if answer.description is None:
        print(shown(f"{address} {answer.found.phrase}{answer.found.note}"), flush=True)
        return EXIT_STANDS_STILL
    print(shown(f"{answer.description.task} at {address}: {answer.description.phase}"), flush=True)
    return 0


# -- the caller's jobs on this host --


@dataclass(frozen=True, slots=True)
class _Named:
    """A running job with its number: "" or zeros while its tasks have none."""

    job: LocalJob
    number: str

    def words(self) -> str:
        count = len(self.job.cluster)
        folder = self.job.here[0].folder
        return (
            f"{f'job {self.number}' if self.number.strip('0') else 'a job without a number yet'}, "
            f"{count} task{'s' if count != 1 else ''}, started {_age(time.time() - self.job.started)} ago"
            f"{f' in {folder}' if folder else ''}"
        )


def _running_jobs(name: str) -> list[_Named]:
    """The caller's jobs on this host, or those whose number begins with ``name``."""
    from lockstep.diagnose.collect import collect
    from lockstep.runtime.running_jobs import running_jobs

    jobs = running_jobs()
    if jobs:
        settle(say)
    # Their monitors only: a number is all that is needed, and a task may be stuck.
    found = collect({job.address: job.address for job in jobs}, PROBE_ALL_SECONDS, together=True)
    numbers = {address: seen.monitor.job for address, seen in found.items() if seen.monitor is not None}
    named = [_Named(job, numbers.get(job.address, "")) for job in jobs]
    return [one for one in named if one.number.startswith(name)]


def _which_one(jobs: Sequence[_Named], watched: Sequence[ListedWatch]) -> list[str]:
    rows = [f"lockstep why {one.job.address}    {one.words()}" for one in jobs]
    rows += [f"lockstep why {one.watched}    {_words(one)}" for one in watched]
    return [f"{len(rows)} jobs of yours run on this host; ask one of them:", *rows]


# -- jobs that 'lockstep watch' has started, or was attached to --


def _watched_jobs(name: str) -> list[ListedWatch]:
    from lockstep.watch.asking import watched_jobs

    return [one for one in watched_jobs() if one.watched.startswith(name)]


def _words(job: ListedWatch) -> str:
    age = _age(time.time() - job.started)
    return f"the watched job {job.watched} ({job.command}), started {age} ago in {job.folder}"


def _ask_watcher(job: ListedWatch, asked: _Asked) -> int:
    from lockstep.diagnose.text import render
    from lockstep.diagnose.verdict import ReportError
    from lockstep.watch import phrases
    from lockstep.watch.asking import ask

    if not asked.as_json:
        say(f"asking the watcher of {_words(job)}")
    while True:
        try:
            found = ask(job)
        except (OSError, ReportError) as error:
            raise BadInput(f"the watcher of job {job.watched} does not answer ({error}); has the job ended?") from None
        kind = ReportKind.ANSWER if found.verdict is None or found.verdict.proven else ReportKind.NOTICE
        text = render(kind, found, phrases.job_goes_well(), phrases.nothing_proven())
        _show(found.to_json(), text, asked.as_json)
        if not asked.watch:
            return 0 if found.healthy else EXIT_STANDS_STILL
        time.sleep(WATCH_SECONDS)


def _number_in(path: Path) -> str:
    """The number of the job, where the folder is named after it."""
    return path.name if re.fullmatch("[0-9a-f]{16}", path.name) else ""


def _age(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2 h``, ``5 days``."""
    for size, unit, most in ((1, "s", 120), (60, "min", 120), (3600, "h", 48)):
        if seconds < size * most:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


# -- a live cluster --


def _ask_address(asked: _Asked) -> int:
    from lockstep.diagnose.asking import cluster_at

    began = time.monotonic()
    return _answers(cluster_at(asked.target), asked, began)


def _answers(cluster: dict[str, str], asked: _Asked, began: float) -> int:
    while True:
        code = _one_answer(cluster, asked, began)
        if not asked.watch:
            return code
        time.sleep(WATCH_SECONDS)
        began = time.monotonic()


def _one_answer(cluster: dict[str, str], asked: _Asked, began: float) -> int:
    from lockstep.diagnose.asking import analysed
    from lockstep.diagnose.collect import collect, fetch_stack

    left = WHY_BUDGET_SECONDS - PROBE_ALL_SECONDS - (time.monotonic() - began)
    found = collect(cluster, max(PROBE_ALL_SECONDS, min(WHY_ASK_SECONDS, left)), together=True)
    diagnosis = analysed(found, "lockstep why")
    late = {
        task: seen.address for task, seen in found.items() if seen.view is None and seen.silence.reach in MAY_BE_LATE
    }
    if late and (diagnosis.verdict is None or not diagnosis.verdict.proven):
        found |= collect(late, WHY_AGAIN_SECONDS, together=True)
        diagnosis = analysed(found, "lockstep why")
        began = time.monotonic()
    verdict = diagnosis.verdict
    if verdict is not None and (seen := found.get(verdict.culprit)) is not None and seen.view is None:
        left = WHY_BUDGET_SECONDS - (time.monotonic() - began)
        if seen.monitor is not None and not seen.monitor.exited and left > 0.1:
            stack = fetch_stack(seen.address, left)
            diagnosis = replace(diagnosis, verdict=replace(verdict, stack=stack or verdict.stack))
    _show(diagnosis.to_json(), _text_of(diagnosis), asked.as_json)
    return 0 if diagnosis.healthy else EXIT_STANDS_STILL


def _text_of(diagnosis: Diagnosis) -> str:
    from lockstep.diagnose.text import render

    proven = diagnosis.verdict is None or diagnosis.verdict.proven
    kind = ReportKind.ANSWER if proven else ReportKind.NOTICE
    return render(kind, diagnosis)


def _show(data: bytes, text: str, as_json: bool) -> None:
    print(data.decode() if as_json else shown(text), flush=True)


# -- the files of a dead one --


def _read_files(asked: _Asked) -> int:
    from lockstep.diagnose.analyse import analyse
    from lockstep.diagnose.files import evidence_of, read_folder

    path = Path(asked.target)
    if not path.is_dir():
        raise BadInput(f"{asked.target} is neither an address like HOST:PORT nor a folder; give one of the two.")
    found = read_folder(path)
    if found.report is None and not found.views:
        return _read_dumps(path, asked, found.problems)
    for problem in found.problems:
        say(problem)
    diagnosis = found.report or analyse(evidence_of(found))
    job, age = diagnosis.job or _number_in(path), time.time() - (diagnosis.time or found.newest)
    if asked.as_json:
        fields = {**diagnosis.to_fields(), "problems": found.problems}
        print(json.dumps({**fields, "job": job, "folder": str(path), "age_seconds": round(age, 1)}), flush=True)
    else:
        of_job = f" of job {job}" if job else ""
        print(f"From the files{of_job} in {path}, {_age(age)} old; nothing was asked.", flush=True)
        print(shown(_text_of(diagnosis)), flush=True)
    return 0 if diagnosis.healthy else EXIT_STANDS_STILL


# -- the dumps of anybody's job --


def _read_dumps(path: Path, asked: _Asked, problems: Sequence[str]) -> int:
    from lockstep.diagnose.text import render
    from lockstep.flight import phrases
    from lockstep.flight.analysis import account_of
    from lockstep.flight.diagnosis import diagnosis_of
    from lockstep.flight.dump_folder import read_dump_folder

    found = read_dump_folder(path)
    for problem in (*problems, *found.problems):
        say(problem)
    if not found.recordings:
        raise BadInput(
            f"{path} has no readable report or snapshot, nor a dump of torch's flight recorder; give the folder that "
            "the job named at its end, or that of TORCH_FR_DUMP_TEMP_FILE."
        )
    diagnosis = diagnosis_of(account_of(found.recordings), asker="files")
    age = time.time() - found.newest
    if asked.as_json:
        fields = {**diagnosis.to_fields(), "problems": [*problems, *found.problems]}
        print(json.dumps({**fields, "folder": str(path), "age_seconds": round(age, 1)}), flush=True)
    else:
        print(shown(phrases.from_dumps(len(found.recordings), str(path), _age(age))), flush=True)
        print(shown(render(ReportKind.ANSWER, diagnosis, phrases.no_collective_is_stuck())), flush=True)
    return 0 if diagnosis.healthy else EXIT_STANDS_STILL
