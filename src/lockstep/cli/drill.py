"""``lockstep drill``: plant a fault in a small real cluster, and see what it reports and how soon."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from lockstep.cli.key_flags import KEY_FLAGS_HELP
from lockstep.errors import EXIT_BAD_INPUT, BadInput, HelpAsked
from lockstep.security.chosen import settle
from lockstep.terminal import drop_what_cannot_be_written, say

LINGER = 2.0
"""Seconds for which a monitor of a drill answers for a task that failed."""

_HELP = """\
lockstep drill: fire drills for the promise that nothing waits in silence.

  lockstep drill --list          the faults that can be planted
  lockstep drill NAME [NAME...]  run a small cluster, plant the fault, show what was reported and when
  lockstep drill --all           all of them, one after the other

  --json                         one JSON object per drill instead of a table
  --keep=FOLDER                  keep the run folders (reports, journals, output of each task) there
{key_flags}
Each drill starts a real cluster on this machine (one server and two workers without torch, a few seconds).
Drills that need separate hosts use network namespaces; without root they are skipped, with the reason.
Exit codes: 0 every drill went as expected, 1 one did not, 2 bad input.
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    from lockstep.drill.cluster import MONITOR_FLAG, TASK_FLAG

    if argv and argv[0].startswith(TASK_FLAG):
        from lockstep.drill.task import TaskPlan, run_drill_task

        drop_what_cannot_be_written()
        return run_drill_task(TaskPlan.parse(argv[1]), int(argv[0].removeprefix(TASK_FLAG)))
    if argv and argv[0].startswith(MONITOR_FLAG):
        drop_what_cannot_be_written()
        return _run_monitor(argv[1])
    return _run_drills(argv)


def _run_monitor(text: str) -> int:
    from lockstep.drill.cluster import TASK_FLAG
    from lockstep.drill.task import TaskPlan
    from lockstep.runtime.monitor.monitor import MonitorSpec, run_monitor
    from lockstep.runtime.monitor.refusal import answer_for_refused
    from lockstep.runtime.monitor.task_process import REPORT_FD
    from lockstep.runtime.startup.cluster import ClusterSpec

    plan = TaskPlan.parse(text)
    spec = ClusterSpec(ps_hosts=plan.ps_hosts, worker_hosts=plan.worker_hosts)
    if (failure := plan.failure_at_start()) is not None and failure.refused:
        answer_for_refused(spec.for_task(plan.id), plan.version(), failure.text, LINGER)
        return EXIT_BAD_INPUT
    hosts = plan.ps_hosts if plan.id.role.value == "ps" else plan.worker_hosts
    host, _, port = hosts[plan.id.index].rpartition(":")
    command = (sys.executable, "-m", "lockstep", "drill", f"{TASK_FLAG}{REPORT_FD}", text)
    return run_monitor(
        MonitorSpec(
            task=plan.id,
            host=host,
            port=int(port),
            command=command,
            version=plan.version(),
            linger_seconds=LINGER,
            cluster=spec.all_addresses(),
        )
    )


def _run_drills(argv: Sequence[str]) -> int:
    from lockstep.cli.flags.values import did_you_mean, nearest
    from lockstep.drill.catalogue import DRILLS, find

    if not argv or any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP.format(key_flags=KEY_FLAGS_HELP))
    names = [word for word in argv if not word.startswith("-")]
    flags = [word for word in argv if word.startswith("-")]
    known = [drill.name for drill in DRILLS]
    keep = ""
    for flag in flags:
        if flag.startswith("--keep="):
            keep = flag.removeprefix("--keep=")
        elif flag not in ("--list", "--all", "--json"):
            raise BadInput(f"'lockstep drill' has no flag {flag!r}; 'lockstep drill --help' lists its flags.")
    for name in names:
        if name not in known:
            alike = nearest(name, known)
            remedy = did_you_mean(alike) if alike else "'lockstep drill --list' lists all drills."
            raise BadInput(f"there is no drill {name!r}; {remedy}")
    if "--list" in flags:
        return _list()
    if not names and "--all" not in flags:
        raise BadInput("name a drill, or give --all; 'lockstep drill --list' lists all drills.")
    chosen = list(DRILLS) if "--all" in flags else [find(name) for name in names]
    return _run_all(chosen, as_json="--json" in flags, keep=keep)


def _list() -> int:
    from lockstep.drill.catalogue import DRILLS

    for drill in DRILLS:
        print(f"{drill.name:<26} {drill.group:<14} {drill.story}")
    return 0


def _run_all(chosen: Sequence[object], *, as_json: bool, keep: str) -> int:
    from lockstep.drill.model import Drill
    from lockstep.drill.run import run_drill
    from lockstep.runtime.processes import become_subreaper

    settle(say)
    become_subreaper()
    failed = 0
    for drill in chosen:
        assert isinstance(drill, Drill)
        result = run_drill(drill, keep)
        failed += result.status == "failed"
        if as_json:
            print(json.dumps(result.to_fields()), flush=True)
        else:
            print(result.line(), flush=True)
            if len(chosen) == 1 and result.report:
                print(result.report)
    return 1 if failed else 0
