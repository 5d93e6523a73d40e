"""``lockstep why``: asks a live cluster why it hangs, from any machine, or reads the files of one that has ended."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.errors import BadInput, HelpAsked
from lockstep.protocol.core.causes import ReportKind
from lockstep.protocol.core.timing import NOTICE_SECONDS, PATIENCE_SECONDS, WHY_ASK_SECONDS, WHY_BUDGET_SECONDS
from lockstep.terminal import say

_HELP = """\
lockstep why: who waits for whom, for which tensor, and why.

  lockstep why HOST:PORT     ask the cluster that this task belongs to (any task will do)
  lockstep why FOLDER        read the files of a run that has ended
  lockstep why               your newest run folder under the temporary directory

  --watch                    ask again every two seconds, until Ctrl-C
  --json                     one JSON object instead of text

Exit codes: 0 healthy, 3 something is stuck, 2 bad input.
"""

EXIT_STANDS_STILL = 3
WATCH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class _Asked:
    target: str
    watch: bool
    as_json: bool


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    asked = _parse(argv)
    if _is_address(asked.target):
        return _ask_cluster(asked)
    return _read_files(asked)


def _parse(argv: Sequence[str]) -> _Asked:
    if any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP)
    targets = [word for word in argv if not word.startswith("-")]
    unknown = [word for word in argv if word.startswith("-") and word not in ("--watch", "--json")]
    if unknown:
        raise BadInput(f"'lockstep why' has no flag {unknown[0]!r}; it has --watch and --json.")
    if len(targets) > 1:
        raise BadInput("'lockstep why' takes one address or one folder; any task of the cluster will do.")
    return _Asked(targets[0] if targets else _newest_folder(), "--watch" in argv, "--json" in argv)


def _newest_folder() -> str:
    from lockstep.runtime.watch.run_folder import run_folders

    folders = run_folders()
    if not folders:
        raise BadInput(
            "no run folder of yours was found; write 'lockstep why HOST:PORT' with the address of any task, or the "
            "folder that the job named at its end."
        )
    return str(folders[0])


def _is_address(target: str) -> bool:
    _, _, port = target.rpartition(":")
    return os.sep not in target and port.isdecimal()


# -- a live cluster --


def _ask_cluster(asked: _Asked) -> int:
    from lockstep.diagnose.collect import look_at

    began = time.monotonic()
    first = look_at("", asked.target, 2 * WHY_ASK_SECONDS)
    if first.monitor is None:
        raise BadInput(
            f"no task answers at {asked.target} ({first.monitor_silence.text}); give the address of another task of "
            "the cluster, or the folder of the run."
        )
    cluster = dict(first.monitor.cluster) or {first.monitor.task: asked.target}
    # The cluster may use a different name for this host than the person who asks.
    cluster[first.monitor.task] = asked.target
    while True:
        code = _one_answer(cluster, asked, began)
        if not asked.watch:
            return code
        time.sleep(WATCH_SECONDS)
        began = time.monotonic()


def _one_answer(cluster: dict[str, str], asked: _Asked, began: float) -> int:
    from lockstep.diagnose.analyse import analyse
    from lockstep.diagnose.collect import collect, fetch_stack
    from lockstep.diagnose.evidence import Evidence
    from lockstep.version import __version__

    found = collect(cluster, WHY_ASK_SECONDS)
    usual = max((seen.view.usual for seen in found.values() if seen.view is not None), default=NOTICE_SECONDS)
    evidence = Evidence(
        tasks=found,
        asker="lockstep why",
        version=__version__,
        floor=max(1.5, 0.75 * min(usual, 60.0)),
        patience=max(PATIENCE_SECONDS, min(usual, 60.0)),
        time=time.time(),
    )
    diagnosis = analyse(evidence)
    verdict = diagnosis.verdict
    if verdict is not None and (seen := found.get(verdict.culprit)) is not None and seen.view is None:
        left = WHY_BUDGET_SECONDS - (time.monotonic() - began)
        if seen.monitor is not None and not seen.monitor.exited and left > 0.1:
            stack = fetch_stack(seen.address, left)
            diagnosis = replace(diagnosis, verdict=replace(verdict, stack=stack or verdict.stack))
    _show(diagnosis.to_json(), _text_of(diagnosis), asked.as_json)
    return 0 if diagnosis.healthy else EXIT_STANDS_STILL


def _text_of(diagnosis: object) -> str:
    from lockstep.diagnose.text import render
    from lockstep.diagnose.verdict import Diagnosis

    assert isinstance(diagnosis, Diagnosis)
    proven = diagnosis.verdict is None or diagnosis.verdict.proven
    kind = ReportKind.ANSWER if proven else ReportKind.NOTICE
    return render(kind, diagnosis)


def _show(data: bytes, text: str, as_json: bool) -> None:
    print(data.decode() if as_json else text, flush=True)


# -- the files of a dead one --


def _read_files(asked: _Asked) -> int:
    from lockstep.diagnose.analyse import analyse
    from lockstep.diagnose.files import evidence_of, read_folder

    path = Path(asked.target)
    if not path.is_dir():
        raise BadInput(f"{asked.target} is neither an address like HOST:PORT nor a folder; give one of the two.")
    found = read_folder(path)
    for problem in found.problems:
        say(problem)
    if found.report is None and not found.views:
        raise BadInput(f"{path} has no readable report or snapshot; give the folder that the job named at its end.")
    diagnosis = found.report or analyse(evidence_of(found))
    if asked.as_json:
        fields = json.loads(diagnosis.to_json())
        print(json.dumps({**fields, "problems": found.problems}), flush=True)
    else:
        print(_text_of(diagnosis), flush=True)
    return 0 if diagnosis.healthy else EXIT_STANDS_STILL
