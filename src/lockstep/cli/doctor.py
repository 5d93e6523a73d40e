"""``lockstep doctor``: why a cluster does not start. Takes the flags of the job itself; imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence

from lockstep.benchmark.models.catalogue import UnknownModel
from lockstep.benchmark.settings.config import BenchConfig, settings, store_port
from lockstep.cli.flags import DoctorLine, parse_doctor
from lockstep.cli.start_checks import job_of, proxies
from lockstep.doctor.examination import Examination, Order, examine
from lockstep.doctor.facts import Shared
from lockstep.doctor.finding import DoctorFinding, FindingKind, in_order
from lockstep.doctor.host import JobRequirements, look_at_host
from lockstep.doctor.place import ClusterEngine, engine_of
from lockstep.doctor.posture import Openings, posture_lines
from lockstep.doctor.rules_machine import VERBS
from lockstep.errors import EXIT_BAD_INPUT, BadInput, HelpAsked
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.messages import Setting
from lockstep.runtime.startup.cluster import ClusterSpec, cluster_problems
from lockstep.runtime.startup.own_name import with_own_address
from lockstep.security.chosen import settle
from lockstep.terminal import say, shown
from lockstep.transports.registry import runs_here
from lockstep.version import __version__

EXIT_HEALTHY = 0
EXIT_DEFECTS = 1
WAIT_SECONDS = 2.0
MOST_WAIT_SECONDS = 3600.0

_HELP = """\
lockstep doctor: find out why a cluster does not start, or will not.

  lockstep doctor [FLAGS OF THE JOB] [--json] [--wait=SECONDS]

Give it the flags of the job ('lockstep bench --help' lists them), at least --ps_hosts and --worker_hosts. With
--job_name and --task_index it examines that task; without them, all tasks with an address of this machine. In a pod
with TF_CONFIG it needs no flags; it knows where it runs (a pod, a step of Slurm, an actor of Ray), and how to get there
what is missing.

Run it on one host, or on all at the same time: then each listens where its task would, tries all others, and compares
flags with them. It works before the job starts, while it starts, and while it runs.

  --json          print one JSON object instead of sentences
  --wait=SECONDS  how long to wait for others that do not answer yet (2); give more if you start it by hand
                  on one host after another

Exit codes: 0 nothing prevents the job from working, 1 something does, 2 bad input (also: grpc+verbs without RDMA)
"""


def run(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    rest, as_json, wait = _own_flags(argv)
    line = parse_doctor(rest, os.environ)
    result = _examine(line, wait, os.environ)
    engine = engine_of(os.environ)
    print(json.dumps(_as_json(result, engine), indent=2) if as_json else shown("\n".join(_lines(result, engine))))
    if any(finding.kind is FindingKind.RDMA and finding.keeps_from_working for finding in result.findings):
        return EXIT_BAD_INPUT  # as the job itself would end: what was requested does not exist here
    return EXIT_HEALTHY if result.healthy else EXIT_DEFECTS


def _own_flags(argv: Sequence[str]) -> tuple[list[str], bool, float]:
    rest: list[str] = []
    as_json, wait = False, WAIT_SECONDS
    for word in argv:
        if word in ("-h", "--help"):
            raise HelpAsked(_HELP)
        if word == "--json":
            as_json = True
        elif word.startswith("--wait"):
            wait = _seconds(word)
        else:
            rest.append(word)
    return rest, as_json, wait


def _seconds(word: str) -> float:
    try:
        seconds = float(word.removeprefix("--wait="))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MOST_WAIT_SECONDS:
        raise BadInput(f"{word!r} is not a number of seconds from 0 to {MOST_WAIT_SECONDS:.0f}; write --wait=30.")
    return seconds


def _examine(line: DoctorLine, wait: float, environ: Mapping[str, str]) -> Examination:
    config = line.config
    spec = config.cluster
    assert spec is not None
    job = job_of(config, environ, line.data_dir)
    broken = cluster_problems(spec) if config.local is None else []
    if broken or config.local is not None:
        # A local cluster has no addresses yet, and inconsistent lists lead nowhere.
        return _this_machine_only(line, job)
    order = Order(
        spec=with_own_address(spec, environ),
        settings=_settings(config) if line.describes_job else (),
        version=__version__,
        bad_flags=line.problems,
        proxies=proxies(environ),
        openings=Openings(store_port(config), _uses_rdma(spec)),
        wait_seconds=wait,
        look_at_machine=lambda tasks: look_at_host(job, tasks),
    )
    settle(say)
    return examine(order)


def _uses_rdma(spec: ClusterSpec) -> bool:
    may = spec.protocol == VERBS or (spec.protocol == "auto" and not spec.require_private)
    return spec.has_servers and may and runs_here(VERBS, spec.rdma)


def _settings(config: BenchConfig) -> tuple[Setting, ...]:
    try:
        return settings(config)
    except (KeyError, UnknownModel):
        return ()  # the sentence about the unknown model or optimizer covers it


def _this_machine_only(line: DoctorLine, job: JobRequirements) -> Examination:
    config = line.config
    tasks = (config.task,) if config.task is not None else job.shape.tasks() if config.local is not None else ()
    shared: Shared = look_at_host(job, tuple(task for task in tasks if task is not None))
    found = [*(DoctorFinding(FindingKind.FLAGS, sentence) for sentence in line.problems), *shared.findings]
    return Examination(tuple(in_order(found)), tuple(map(str, tasks)), (), (), 0.0)


def _lines(result: Examination, engine: ClusterEngine) -> list[str]:
    tasks = ", ".join(TaskId.parse(task).short for task in result.tasks) or "no task on this machine"
    others = [visit for visit in result.visits if visit.host not in result.tasks]
    reached, looked = len({visit.host for visit in others if visit.reached}), len({visit.host for visit in others})
    defects = [finding for finding in result.findings if finding.keeps_from_working]
    remarks = [finding for finding in result.findings if not finding.keeps_from_working]
    where = f" in {engine.words}" if engine else ""
    lines = [f"lockstep doctor for {tasks}{where}: {reached} of {looked} other tasks answer ({result.seconds:.1f} s)"]
    lines += [f"  {number}. {finding.sentence}" for number, finding in enumerate(defects, 1)]
    lines += [f"  note: {finding.sentence}" for finding in remarks]
    if not defects:
        lines.append("  nothing was found that keeps the job from working")
    return lines + [f"  {line}" for line in posture_lines(result.listeners)]


def _as_json(result: Examination, engine: ClusterEngine) -> dict[str, object]:
    return {
        "engine": engine.value or None,
        "healthy": result.healthy,
        "tasks": list(result.tasks),
        "seconds": round(result.seconds, 3),
        "findings": [
            {
                "cause": finding.kind.code,
                "keeps_from_working": finding.keeps_from_working,
                "sentence": finding.sentence,
            }
            for finding in result.findings
        ],
        "listeners": [listener.to_json() for listener in result.listeners],
        "pairs": [
            {
                "from": visit.visitor,
                "to": visit.host,
                "address": visit.address,
                "reached": visit.reached,
                "answer": visit.answer.value,
                "words": visit.words,
            }
            for visit in result.visits
        ],
    }
