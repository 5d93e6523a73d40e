"""``lockstep drill``: plant a fault in a small real cluster, and see what it reports and how soon."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lockstep.cli.key_flags import KEY_FLAGS_HELP
from lockstep.errors import EXIT_BAD_INPUT, BadInput, HelpAsked
from lockstep.security.chosen import settle
from lockstep.terminal import drop_what_cannot_be_written, say

if TYPE_CHECKING:
    from lockstep.drill.model import Drill

_WITH_VALUE = ("--keep", "--ps", "--system", "--workers")
_MAYBE_VALUE = ("--ranks",)
_WITHOUT_VALUE = ("--all", "--fooled", "--json", "--list")
MOST_TASKS = 120
"""Servers, and workers: where each has a host of its own, they share a network with 254 addresses."""
LINGER = 2.0
"""Seconds for which a monitor of a drill answers for a task that failed."""

_HELP = """\
lockstep drill: fire drills for the promise that nothing waits in silence.

  lockstep drill --list          the faults that can be planted
  lockstep drill NAME [NAME...]  run a small cluster, plant the fault, show what was reported and when
  lockstep drill --all           all of them, one after the other
  lockstep drill --fooled        only those with which a tester had fooled us

  --ranks, --ranks=N             without servers: each of N workers (3) trains and averages its share; with --all,
                                 every drill for which that makes sense
  --system=ddp, --system=fsdp    in a job that is not Lockstep's, of torchrun with three ranks, under 'lockstep watch';
                                 with --list, the faults that can be planted there
  --ps=N, --workers=N            a larger cluster than the drill is made for
  --json                         one JSON object per drill instead of a table, and one for the sum of several
  --keep=FOLDER                  keep the run folders (reports, journals, output of each task) there
{key_flags}
Several drills end with a table of what struck against what was said, and how soon it was said.
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
    from lockstep.runtime.startup.metrics_options import MetricsOptions

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
            metrics=MetricsOptions(plan.metrics_port),
        )
    )


def _run_drills(argv: Sequence[str]) -> int:
    from lockstep.cli.flags.values import did_you_mean, nearest
    from lockstep.drill.catalogue import DRILLS, find

    if not argv or any(word in ("-h", "--help") for word in argv):
        raise HelpAsked(_HELP.format(key_flags=KEY_FLAGS_HELP))
    names = [word for word in argv if not word.startswith("-")]
    flags = dict(_flag(word) for word in argv if word.startswith("-"))
    if "--system" in flags:
        return _run_in_system(names, flags)
    known = [drill.name for drill in DRILLS]
    for name in names:
        if name not in known:
            alike = nearest(name, known)
            remedy = did_you_mean(alike) if alike else "'lockstep drill --list' lists all drills."
            raise BadInput(f"there is no drill {name!r}; {remedy}")
    if "--list" in flags:
        return _list()
    if not names and not {"--all", "--fooled"} & flags.keys():
        raise BadInput("name a drill, or give --all; 'lockstep drill --list' lists all drills.")
    chosen = [find(name) for name in names] if names and "--all" not in flags else list(DRILLS)
    if "--fooled" in flags:
        chosen = [drill for drill in chosen if drill.fooled]
        if not chosen:
            raise BadInput("none of the named drills had fooled us; 'lockstep drill --list' marks those that had.")
    chosen = _sized(chosen, flags, named=bool(names))
    return _run_all(chosen, as_json="--json" in flags, keep=flags.get("--keep", ""))


def _run_in_system(names: Sequence[str], flags: Mapping[str, str]) -> int:
    """The same kind of drill in somebody else's job."""
    from lockstep.drill.matrix import DrillSum
    from lockstep.drill.systems import SYSTEM_DRILLS, SYSTEMS, run_system_drill

    system = flags["--system"]
    if system not in SYSTEMS:
        raise BadInput(f"--system={system} is not known; give one of {', '.join(SYSTEMS)}.")
    unfit = [flag for flag in flags if flag not in ("--system", "--all", "--json", "--keep", "--list")]
    if unfit:
        raise BadInput(f"{unfit[0]!r} does not go with --system; leave it out.")
    known = {drill.name: drill for drill in SYSTEM_DRILLS}
    wrong = [name for name in names if name not in known]
    if wrong:
        raise BadInput(f"there is no drill {wrong[0]!r} with --system; there are {', '.join(known)}.")
    if "--list" in flags:
        for drill in SYSTEM_DRILLS:
            print(f"{drill.name:<26} {drill.story}")
        return 0
    if not names and "--all" not in flags:
        raise BadInput(f"name a drill, or give --all; there are {', '.join(known)}.")
    results = []
    for drill in [known[name] for name in names] or SYSTEM_DRILLS:
        result = run_system_drill(drill, system, flags.get("--keep", ""))
        results.append(result)
        print(json.dumps(result.to_fields()) if "--json" in flags else result.line(), flush=True)
    in_sum = DrillSum.of(results)
    if len(results) > 1:
        print(json.dumps(in_sum.to_fields()) if "--json" in flags else "\n".join(in_sum.lines()))
    return 1 if in_sum.wrong else 0


def _flag(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if name in _WITH_VALUE and not value:
        raise BadInput(f"{name!r} needs a value: {name}=...")
    if name in _WITHOUT_VALUE and equals:
        raise BadInput(f"{name!r} takes no value.")
    if name not in (*_WITH_VALUE, *_MAYBE_VALUE, *_WITHOUT_VALUE):
        raise BadInput(f"'lockstep drill' has no flag {word!r}; 'lockstep drill --help' lists its flags.")
    return name, value


def _sized(chosen: Sequence[Drill], flags: Mapping[str, str], *, named: bool) -> list[Drill]:
    """The drills in a cluster of the requested kind and size; ``named``: each of them was asked for."""
    servers, workers = (_number(name, flags.get(name, "")) for name in ("--ps", "--workers"))
    if "--ranks" not in flags:
        return [drill.sized(servers, workers) for drill in chosen]
    from lockstep.drill.ranks import applies, as_ranks

    if servers or workers:
        raise BadInput("--ranks is a cluster without servers; give --ranks=N instead of --ps and --workers.")
    ranks = _number("--ranks", flags["--ranks"])
    return [as_ranks(drill, ranks) for drill in chosen if named or applies(drill)]


def _number(name: str, text: str) -> int:
    """0 where the flag is not given."""
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) <= MOST_TASKS):
        raise BadInput(f"{name}={text} must be a whole number from 1 to {MOST_TASKS}.")
    return int(text or 0)


def _list() -> int:
    from lockstep.drill.catalogue import DRILLS

    for drill in DRILLS:
        mark = "had fooled us" if drill.fooled else ""
        print(f"{drill.name:<26} {drill.group:<10} {mark:<14} {drill.story}")
    return 0


def _run_all(chosen: Sequence[Drill], *, as_json: bool, keep: str) -> int:
    from lockstep.drill.matrix import DrillSum
    from lockstep.drill.run import run_drill
    from lockstep.runtime.processes import become_subreaper

    settle(say)
    become_subreaper()
    results = []
    for drill in chosen:
        result = run_drill(drill, keep)
        results.append(result)
        print(json.dumps(result.to_fields()) if as_json else result.line(), flush=True)
        if len(chosen) == 1 and result.report and not as_json:
            print(result.report)
    in_sum = DrillSum.of(results)
    if len(results) > 1:
        print(json.dumps(in_sum.to_fields()) if as_json else "\n".join(in_sum.lines()))
    return 1 if in_sum.wrong else 0
