"""The analysis: snapshots in, diagnosis out. Pure: the same evidence always gives the same verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from lockstep.diagnose import input_rules, phrases, task_rules, tensor_rules, work_rules
from lockstep.diagnose.case import Proof, WaitCase
from lockstep.diagnose.evidence import ChainEnd, Chains, Evidence, Waiting, find_chains, has_no_parameter, is_waited_for
from lockstep.diagnose.summary import health_summary, refused_callers, task_lines, timeline
from lockstep.diagnose.verdict import Diagnosis, Edge, Verdict
from lockstep.diagnose.views import TaskView
from lockstep.errors import EXIT_VERDICT
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.endings import WARNINGS

Rule = Callable[[WaitCase], Proof | None]

RULES: tuple[tuple[Cause, Rule], ...] = (
    (Cause.OUT_OF_MEMORY, task_rules.out_of_memory),
    (Cause.WIRING, task_rules.wiring),
    (Cause.MISMATCH, task_rules.version_differs),
    (Cause.DEAD, task_rules.dead),
    (Cause.STALE_INCARNATION, task_rules.stale_incarnation),
    (Cause.LEFTOVER_SERVER, task_rules.leftover_server),
    (Cause.DUPLICATE_TASK, task_rules.duplicate_task),
    (Cause.FROZEN, task_rules.frozen),
    (Cause.COMMUNICATION, task_rules.cut_off),
    (Cause.NEVER_STARTED, task_rules.never_started),
    (Cause.OUT_OF_STEP, task_rules.out_of_step),
    (Cause.COMMUNICATION, work_rules.callback_stuck),
    (Cause.LINK_DOWN, task_rules.link_down),
    (Cause.ONE_WAY_LINK, task_rules.one_way_link),
    (Cause.DEVICE_CALL, task_rules.holds_the_interpreter),
    (Cause.DISK_FULL, work_rules.disk_full),
    (Cause.CHECKPOINT_STUCK, work_rules.checkpoint_stuck),
    (Cause.CHECKPOINT_STUCK, work_rules.shard_stuck),
    (Cause.STRAGGLER, work_rules.shard_slow),
    (Cause.INPUT_STARVED, input_rules.input_starved),
    (Cause.STRAGGLER, input_rules.slow_input),
    (Cause.OTHER_CALL, work_rules.missed_call),
    (Cause.DEADLOCK, work_rules.deadlock),
    (Cause.DEVICE_CALL, work_rules.device_call),
    (Cause.BUSY, work_rules.busy),
    (Cause.COMPILING, work_rules.compiling),
    (Cause.USER_CODE, work_rules.user_code),
    (Cause.LOOPING, work_rules.looping),
    (Cause.STRAGGLER, work_rules.straggler),
    (Cause.OVERLOADED_SERVER, work_rules.overloaded_server),
    (Cause.COMMUNICATION, work_rules.store_stuck),
    (Cause.REQUEST_LOST, tensor_rules.request_lost),
    (Cause.REQUEST_LOST, tensor_rules.commit_lost),
    (Cause.ANSWER_LOST, tensor_rules.answer_lost),
    (Cause.LINK_DOWN, tensor_rules.large_packets_lost),
    (Cause.SLOW_LINK, tensor_rules.slow_link),
    (Cause.LINK_DOWN, tensor_rules.rdma_down),
    (Cause.COMMUNICATION, tensor_rules.transfer_stands),
    (Cause.COMMUNICATION, tensor_rules.sum_stands),
)
"""Each cause with what proves it. A rule looks only at its own evidence and never at what other rules found, so that
a missing rule leaves "unknown" and not another cause."""

GONE = frozenset({Cause.DEAD, Cause.OUT_OF_MEMORY, Cause.STOPPED, Cause.FAILED, Cause.UNKNOWN})
"""Why a task that is waited for to come back is not there; only a new incarnation of it helps."""

CAUSES = frozenset({cause for cause, _ in RULES} | {Cause.ANSWER_LOST})


def without(*causes: Cause) -> tuple[tuple[Cause, Rule], ...]:
    """All rules except those of these causes; to see that an analysis then yields "unknown"."""

    def quiet(rule: Rule) -> Rule:
        def unless_left_out(case: WaitCase) -> Proof | None:
            proof = rule(case)
            return None if proof is not None and proof.cause in causes else proof

        return unless_left_out

    return tuple((cause, quiet(rule)) for cause, rule in RULES if cause not in causes or rule in _OF_TWO_CAUSES)


_OF_TWO_CAUSES: tuple[Rule, ...] = (
    task_rules.holds_the_interpreter,
    work_rules.store_stuck,
    tensor_rules.commit_lost,
)


def analyse(evidence: Evidence, rules: Sequence[tuple[Cause, Rule]] = RULES) -> Diagnosis:
    """Who is waiting for whom, where it began, and why."""
    chains = find_chains(evidence)
    known = Diagnosis(
        job=evidence.job(),
        time=evidence.time,
        asker=evidence.asker,
        tasks=task_lines(evidence),
        timeline=timeline(evidence),
        refused=refused_callers(evidence),
    )
    if evidence.end is not None:
        return _ended(evidence, chains, known, rules)
    if not chains.endings:
        return replace(known, healthy=_all_answer(evidence), summary=health_summary(evidence))
    ordered = sorted(chains.endings.values(), key=_importance)
    judged = [(ending, judge(evidence, ending, rules)) for ending in ordered]
    # The first cause is the first ending that can be proven; without any proof, the most important one is shown.
    # A task that left because of a verdict is dead too, but a late observer must not take that for the cause.
    proven = [one for one in judged if one[1].proven]
    own = [one for one in proven if not _left_by_verdict(evidence, one[1].culprit)]
    first, verdict = (own or proven or judged)[0]
    pairs = {verdict.pair()}
    also: list[Verdict] = []
    for _, other in judged:
        if other.proven and other.pair() not in pairs and not (other.pair() & verdict.pair()):
            pairs.add(other.pair())
            also.append(other)
    return replace(
        known,
        summary=verdict.what,
        verdict=verdict,
        also=tuple(also[:5]),
        causes=tuple(_edge(one) for one in first.chain),
        consequences=_consequences(chains, first),
    )


def _all_answer(evidence: Evidence) -> bool:
    return bool(evidence.tasks) and all(seen.view is not None for seen in evidence.tasks.values())


def _left_by_verdict(evidence: Evidence, task: str) -> bool:
    seen = evidence.tasks.get(task)
    monitor = None if seen is None else seen.monitor
    return monitor is not None and monitor.exited and monitor.exit_code == EXIT_VERDICT


def _importance(ending: ChainEnd) -> tuple[int, int, float]:
    """Earlier steps first, then what holds up most, then what lasts longest."""
    return ending.waiting.wait.step, -ending.followers, -ending.waiting.wait.seconds


def judge(evidence: Evidence, ending: ChainEnd, rules: Sequence[tuple[Cause, Rule]] = RULES) -> Verdict:
    """The verdict on one ending of the chains."""
    case = WaitCase(evidence, ending.waiting, ending.cycle)
    for _, rule in rules:
        proof = rule(case)
        if proof is not None:
            return _verdict(case, proof)
    return _verdict(case, Proof(Cause.UNKNOWN, phrases.nothing_proves_why(case.waiter, case.on)))


def _verdict(case: WaitCase, proof: Proof) -> Verdict:
    culprit, peer = proof.culprit or case.on, proof.peer or case.waiter
    seen = case.evidence.tasks.get(culprit)
    view, monitor = (None, None) if seen is None else (seen.view, seen.monitor)
    wait = case.waiting.wait
    pid = view.pid if view is not None else monitor.pid if monitor is not None else 0
    return Verdict(
        cause=proof.cause,
        culprit=culprit,
        peer=peer,
        host=view.host if view is not None else monitor.host if monitor is not None else "",
        pid=pid,
        key=wait.key or wait.what,
        names=wait.names,
        step=wait.step,
        link=_link_words(case),
        seconds=proof.seconds if proof.seconds >= 0 else wait.seconds,
        stuck=phrases.stuck(case.waiter, _missing(case.waiting), wait.kind, wait.step, slow=proof.cause in WARNINGS),
        what=proof.what,
        evidence=(*proof.evidence, *both_sides(case)),
        stack=proof.stack or _stack_of(case, culprit),
        remedy=proof.remedy or _remedy(case.evidence, proof.cause, culprit, pid),
    )


def _remedy(evidence: Evidence, cause: Cause, culprit: str, pid: int) -> str:
    if cause in GONE and is_waited_for(evidence, culprit):
        return phrases.remedy_while_waited_for(culprit)
    return phrases.remedy(cause, pid)


def _missing(waiting: Waiting) -> str:
    wait = waiting.wait
    return phrases.missing(wait.kind, wait.on, wait.step, wait.bucket, wait.names, wait.what)


def _stack_of(case: WaitCase, culprit: str) -> tuple[str, ...]:
    seen = case.evidence.tasks.get(culprit)
    if seen is None:
        return ()
    if seen.view is not None and seen.view.main is not None:
        return seen.view.main.stack
    return () if seen.monitor is None else seen.monitor.stack


def _link_words(case: WaitCase) -> str:
    mine, theirs = case.links()
    return "; ".join(
        phrases.end_of_a_link(task, link.state, link.path, link.heard)
        for task, link in ((case.waiter, mine), (case.on, theirs))
        if link is not None
    )


def both_sides(case: WaitCase) -> tuple[str, ...]:
    """What each side saw of the missing thing, whatever the cause."""
    wait = case.waiting.wait
    said = [phrases.waits_for(case.waiter, _missing(case.waiting), wait.seconds, wait.state)]
    view, monitor = case.view, case.monitor
    if view is not None:
        said.append(phrases.told_of_itself(case.on, _doing(view)))
        tensor = case.tensor(view, case.number, case.bucket, case.waiter)
        if tensor is not None:
            said.append(phrases.saw_of_this_tensor(case.on, tensor.ages))
        return tuple(said)
    said.append(phrases.does_not_answer(case.on, case.seen.silence.text))
    if monitor is not None:
        said.append(phrases.monitor_of(case.on, monitor.pid, monitor.host, monitor.phase, monitor.state))
    else:
        said.append(phrases.monitor_does_not_answer(case.on, case.seen.monitor_silence.text))
    return tuple(said)


def _doing(view: TaskView) -> str:
    main, store = view.main, view.store
    if main is not None and main.doing is not Doing.NOTHING:
        return phrases.thread_does(main.doing, main.detail, main.seconds, view.step)
    if store is not None and store.busy > 0:
        return phrases.store_does(store.doing, store.busy, view.step)
    return phrases.no_progress(view.phase, view.step, view.still)


def _edge(waiting: Waiting) -> Edge:
    wait = waiting.wait
    missing = _missing(waiting)
    return Edge(waiter=waiting.waiter, on=wait.on, what=missing, step=wait.step, seconds=wait.seconds, state=wait.state)


def _consequences(chains: Chains, first: ChainEnd) -> tuple[Edge, ...]:
    inside = {(one.waiter, one.on) for one in first.chain}
    rest: Iterable[Waiting] = (one for one in chains.long_waits if (one.waiter, one.on) not in inside)
    return tuple(_edge(one) for one in rest)[:200]


def _ended(evidence: Evidence, chains: Chains, known: Diagnosis, rules: Sequence[tuple[Cause, Rule]]) -> Diagnosis:
    """The job is over: the coordinator's reason is the verdict; the waits complete it."""
    end = evidence.end
    assert end is not None
    cause = end.reason.cause
    # A bucket without a parameter is in no program: that one lacks it too follows from the end, and explains nothing.
    named = [e for e in chains.endings.values() if not has_no_parameter(e.waiting.wait)]
    about = [e for e in named if end.culprit in (e.waiting.on, e.waiting.waiter)]
    seen = evidence.tasks.get(end.culprit)
    peer = evidence.asker if evidence.asker in evidence.tasks and evidence.asker != end.culprit else ""
    verdict = Verdict(cause=cause, culprit=end.culprit, peer=peer, step=end.step, remedy=phrases.remedy(cause))
    if about:
        shown = min(about, key=_importance)
        judged = judge(evidence, shown, rules)
        verdict = replace(judged, cause=cause, culprit=end.culprit, remedy=phrases.remedy(cause))
    elif seen is not None and seen.monitor is not None:
        verdict = replace(verdict, host=seen.monitor.host, pid=seen.monitor.pid)
    what = phrases.about(end.culprit, end.reason.text)
    step = verdict.step if verdict.step > -2 else end.step
    verdict = replace(verdict, stuck=phrases.job_ended(step), what=what, step=step)
    chain = tuple(_edge(one) for one in (min(about, key=_importance).chain if about else ()))
    return replace(known, summary=what, verdict=verdict, causes=chain)
