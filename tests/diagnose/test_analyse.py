"""The analysis on made-up snapshots: the right cause for each fault, and never a confident wrong one."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from diagnose.faulty import (
    FAULTY,
    Faulty,
    commit_lost,
    dead,
    frozen,
    gradient_lost,
    host_paused,
    keys,
    large_packets_lost,
    never_started,
    request_lost,
    store_stuck,
    user_code,
)
from helpers.reasons import because
from helpers.snapshots import (
    GRADIENT,
    PS0,
    PS1,
    STEP,
    W0,
    W1,
    Cluster,
    healthy,
    key,
    missing_gradient,
    standing,
    wait,
    waiting_worker,
)
from lockstep.diagnose.analyse import CAUSES, RULES, analyse, without
from lockstep.diagnose.evidence import Ended, Evidence, ended_by
from lockstep.diagnose.phrases.units import in_milliseconds, in_seconds
from lockstep.diagnose.text import lead_line, render
from lockstep.diagnose.verdict import Diagnosis, Verdict
from lockstep.errors import EXIT_VERDICT
from lockstep.protocol.core.causes import Cause, ReportKind, Source
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.endings import WARNINGS
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.core.waits import WaitKind

IDS = [make.__name__ for _, make, _, _ in FAULTY]


@functools.cache
def evidence_of(make: Callable[[], Cluster]) -> Evidence:
    """Made once: evidence never changes."""
    return make().evidence()


def verdict_of(diagnosis: Diagnosis) -> Verdict:
    assert diagnosis.verdict is not None
    return diagnosis.verdict


@pytest.mark.parametrize("faulty", FAULTY, ids=IDS)
def test_each_fault_gets_its_cause_its_pair_its_key_and_its_step(faulty: Faulty) -> None:
    cause, make, pair, contains = faulty
    verdict = verdict_of(analyse(evidence_of(make)))
    assert verdict.cause is cause
    assert verdict.pair() == pair
    assert contains in verdict.key
    assert verdict.evidence, "a verdict shows what each side saw"
    assert verdict.remedy
    assert verdict.step in (STEP, -1)


@pytest.mark.parametrize("faulty", FAULTY, ids=IDS)
def test_without_its_rule_the_cause_is_unknown_and_pair_and_key_stay_right(faulty: Faulty) -> None:
    cause, make, pair, contains = faulty
    verdict = verdict_of(analyse(evidence_of(make), without(cause)))
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.pair() == pair
    assert contains in verdict.key
    assert len(verdict.evidence) >= 2, "it shows what each side saw"


@pytest.mark.parametrize("left_out", sorted(CAUSES))
def test_leaving_out_any_other_rule_changes_no_cause(left_out: Cause) -> None:
    for cause, make, _, _ in FAULTY:
        found = verdict_of(analyse(evidence_of(make), without(left_out))).cause
        assert found is (Cause.UNKNOWN if cause is left_out else cause), make.__name__


def test_a_rank_over_gloo_that_has_finished_early_is_out_of_step_and_no_part_of_a_deadlock() -> None:
    cluster = healthy()
    cluster.task(W0)["waits"] = [wait(W1, WaitKind.SUM, 5.0)]
    ended = cluster.task(W1)
    ended["waits"] = [wait(W0, WaitKind.END, 5.0)]
    ended["step"] = STEP - 1
    standing(cluster, "finishing", where="lockstep")
    verdict = verdict_of(analyse(cluster.evidence()))
    assert (verdict.cause, verdict.culprit, verdict.peer) == (Cause.OUT_OF_STEP, str(W1), str(W0))
    assert f"after {STEP} steps" in verdict.what


def test_a_server_that_still_imports_torch_is_not_called_stuck() -> None:
    cluster = store_stuck()
    cluster.task(PS0)["phase"] = "importing torch"
    verdict = verdict_of(analyse(cluster.evidence()))
    assert verdict.cause is not Cause.COMMUNICATION
    assert not verdict.proven


@pytest.mark.parametrize("phase", ["starting", "importing torch", "connecting", "comparing settings"])
@pytest.mark.parametrize("who_knows", ["task", "monitor"])
def test_a_task_that_comes_back_and_has_no_model_yet_has_lost_no_request(phase: str, who_knows: str) -> None:
    cluster = request_lost()
    if who_knows == "task":
        cluster.task(W1)["phase"] = phase
    else:
        cluster.monitor(W1)["description"]["phase"] = phase
    cluster.task(W1)["machines"]["role"]["buckets"] = []
    assert verdict_of(analyse(cluster.evidence())).cause is not Cause.REQUEST_LOST


def test_a_request_that_is_lost_in_the_first_step_is_named_although_settings_are_still_compared() -> None:
    cluster = request_lost()
    cluster.task(W1)["phase"] = "comparing settings"
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.REQUEST_LOST


def test_every_cause_of_the_rules_is_struck_by_one_of_the_faults() -> None:
    assert {cause for cause, _, _, _ in FAULTY} == CAUSES
    assert {cause for cause, _ in RULES} <= CAUSES


def test_a_healthy_cluster_is_called_so_with_the_slowest_part_of_a_step() -> None:
    diagnosis = analyse(healthy().evidence())
    assert diagnosis.healthy
    assert diagnosis.verdict is None
    assert "healthy: 3 tasks answer" in diagnosis.summary
    assert "the slowest part is computing on worker " in diagnosis.summary


def test_a_short_wait_is_no_reason_to_speak() -> None:
    assert analyse(missing_gradient(seconds=0.5).evidence()).healthy


def test_a_parameter_that_was_asked_for_early_is_no_wait() -> None:
    cluster = healthy()
    cluster.task(W0)["waits"] = [wait(PS0, key(PS0, W0, "parameter/bucket_0"), 60.0)]
    assert analyse(cluster.evidence()).healthy


def test_what_only_follows_is_set_apart() -> None:
    diagnosis = analyse(frozen().evidence())
    assert [edge.waiter for edge in diagnosis.causes] == [str(PS0)]
    assert [edge.waiter for edge in diagnosis.consequences] == [str(W0)]


def test_a_chain_over_two_servers_leads_to_the_worker_that_began_it() -> None:
    """Worker 0 waits for server 1, which waits for worker 1, which waits for server 0: that one is frozen."""
    cluster = healthy(servers=2)
    waiting_worker(cluster, W0, state="confirmed")
    cluster.task(W0)["waits"] = [wait(PS1, key(PS1, W0, "parameter/bucket_0"), 5.0)]
    cluster.task(PS1)["waits"] = [wait(W1, key(W1, PS1, "gradient/bucket_0"), 5.0)]
    cluster.task(W1)["main"] = {"doing": "waiting", "detail": "version 10", "seconds": 6.0, "cpu": 0.0}
    cluster.task(W1)["machines"]["role"]["wants_version"] = STEP
    cluster.task(W1)["waits"] = [wait(PS0, key(PS0, W1, "parameter/bucket_0"), 6.0, step=STEP - 1)]
    cluster.no_answer(PS0)
    cluster.monitor(PS0).update(process={"state": "stopped"}, stopped_seconds=6.0)
    verdict = verdict_of(analyse(cluster.evidence()))
    assert (verdict.cause, verdict.culprit, verdict.peer) == (Cause.FROZEN, str(PS0), str(W1))


def test_two_causes_that_do_not_depend_on_each_other_are_both_named() -> None:
    cluster = dead()
    cluster.tasks[str(PS1)] = healthy(servers=2).task(PS1)
    cluster.monitors[str(PS1)] = healthy(servers=2).monitor(PS1)
    cluster.task(W0)["main"]["doing"] = "input"
    cluster.task(W0)["main"].update(seconds=6.0, detail="/data/x", where="user code")
    cluster.task(W0)["waits"] = []
    cluster.task(PS1)["waits"] = [wait(W0, key(W0, PS1, "gradient/bucket_0"), 5.0)]
    diagnosis = analyse(cluster.evidence())
    causes = {verdict_of(diagnosis).cause, *(other.cause for other in diagnosis.also)}
    assert causes == {Cause.DEAD, Cause.INPUT_STARVED}


def starved(**found: object) -> Cluster:
    """Worker 0 has waited for its data for 6 s."""
    cluster = healthy()
    facts = {"read": 0, "read_ago": 6.0, "step_seconds": 7.5, "stopped": [], "readers": []} | found
    cluster.task(W0)["main"] = {"doing": "input", "detail": "/data/x", "seconds": 6.0, "cpu": 0.0, "input": facts}
    cluster.task(W0)["waits"] = []
    cluster.task(PS0)["waits"] = [wait(W0, key(W0, PS0, "gradient/bucket_0"), 6.0)]
    return cluster


def test_slow_input_is_named_with_its_file_rate_and_share_and_is_no_verdict() -> None:
    verdict = verdict_of(analyse(starved(read=6, read_ago=0.4).evidence()))
    assert (verdict.cause, verdict.culprit) == (Cause.STRAGGLER, str(W0))
    for part in ("/data/x", "1 records per second", "80% of this step"):
        assert part in verdict.what
    assert verdict.cause in WARNINGS


def test_input_that_has_dried_up_is_starved_however_much_was_read_before() -> None:
    assert verdict_of(analyse(starved(read=6, read_ago=5.0).evidence())).cause is Cause.INPUT_STARVED


def test_a_stopped_decoder_is_named_and_not_the_disk() -> None:
    readers = [{"pid": 77, "state": "stopped"}, {"pid": 78, "state": "sleeping"}]
    verdict = verdict_of(analyse(starved(stopped=[77], readers=readers).evidence()))
    assert (verdict.cause, verdict.culprit) == (Cause.INPUT_STARVED, str(W0))
    assert "the process 77 that reads it is stopped" in verdict.what
    assert verdict.remedy == "Resume reading with: kill -CONT 77"
    assert any("process 78, which reads its data, is sleeping" in line for line in verdict.evidence)


def saving(written_ago: float) -> Cluster:
    """Server 0, the coordinator, has been writing its part of the last checkpoint for 40 s."""
    cluster = healthy()
    cluster.task(PS0)["waits"] = [wait(PS0, WaitKind.SHARD, 40.0)]
    cluster.task(PS0)["shard"] = {"file": "/ckpt/shard-0", "seconds": 40.0, "written_ago": written_ago}
    return cluster


def test_a_checkpoint_that_still_writes_is_no_verdict_and_never_ends_the_job() -> None:
    verdict = verdict_of(analyse(saving(0.5).evidence()))
    assert (verdict.cause, verdict.culprit) == (Cause.STRAGGLER, str(PS0))
    assert "/ckpt/shard-0" in verdict.what
    assert verdict.cause in WARNINGS


def test_a_checkpoint_that_writes_nothing_any_more_is_stuck() -> None:
    verdict = verdict_of(analyse(saving(20.0).evidence()))
    assert (verdict.cause, verdict.culprit) == (Cause.CHECKPOINT_STUCK, str(PS0))


def test_the_end_of_a_job_is_a_verdict_with_what_was_waited_for() -> None:
    cluster = dead()
    cluster.end = Ended(str(W1), STEP, because("was killed by SIGKILL (process 1001 on host-worker-1)", Cause.DEAD))
    verdict = verdict_of(analyse(cluster.evidence(floor=0.0)))
    assert (verdict.cause, verdict.culprit, verdict.key, verdict.step) == (Cause.DEAD, str(W1), keys(), STEP)
    assert verdict.pid == 1001


def test_a_stack_and_the_names_in_the_bucket_are_shown() -> None:
    verdict = verdict_of(analyse(user_code().evidence()))
    assert verdict.stack == ("read (/home/user/train.py:12)",)
    assert verdict.names == ("layer.weight",)


def test_the_same_evidence_always_gives_the_same_answer() -> None:
    evidence = frozen().evidence()
    assert analyse(evidence) == analyse(evidence)


@pytest.mark.parametrize("jobs", [("000000000000000a", "000000000000000b"), ("000000000000000b", "000000000000000a")])
def test_of_two_jobs_named_equally_often_the_first_is_the_job(jobs: tuple[str, str]) -> None:
    """Not the one that the order of a set gives in this process."""
    cluster = healthy(workers=1)
    for task, job in zip((PS0, W0), jobs, strict=True):
        cluster.task(task)["job"] = job
    assert analyse(cluster.evidence()).job == jobs[0]


@pytest.mark.parametrize(
    ("servers", "workers"), [(8, 100), pytest.param(32, 1000, marks=[pytest.mark.slow, pytest.mark.timeout(180)])]
)
def test_a_large_cluster_is_analysed_in_two_seconds(servers: int, workers: int) -> None:
    cluster = healthy(servers, workers)
    shape = cluster.shape
    for index, server in enumerate(shape.server_ids()):
        cluster.task(server)["waits"] = [wait(W1, key(W1, server, f"gradient/bucket_{index}"), 5.0, bucket=index)]
    for worker in shape.worker_ids():
        if worker != W1:
            waiting_worker(cluster, worker, state="confirmed")
            cluster.task(worker)["waits"] = [
                wait(server, key(server, worker, f"parameter/bucket_{index}"), 5.0, bucket=index)
                for index, server in enumerate(shape.server_ids())
            ]
    cluster.no_answer(W1)
    cluster.monitor(W1).update(process={"state": "stopped"}, stopped_seconds=6.0)
    evidence = cluster.evidence()
    began = time.process_time()
    diagnosis = analyse(evidence)
    assert time.process_time() - began < 2.0
    assert verdict_of(diagnosis).cause is Cause.FROZEN
    assert verdict_of(diagnosis).culprit == str(W1)
    assert len(json.dumps(json.loads(diagnosis.to_json()))) < 1 << 20


def test_a_task_that_leaves_at_the_end_of_the_job_is_not_dead_at_once() -> None:
    """Tasks leave one after the other; the word that the job is over may be on its way."""
    cluster = dead()
    for seconds, cause in ((6.0, Cause.UNKNOWN), (12.0, Cause.DEAD)):
        cluster.task(W0)["waits"] = [wait(W1, WaitKind.END, seconds, step=-1, bucket=-1)]
        cluster.task(W0)["main"]["doing"] = "finishing"
        cluster.task(PS0)["waits"] = []
        assert verdict_of(analyse(cluster.evidence())).cause is cause


def test_a_worker_that_has_just_come_to_its_wait_is_in_no_deadlock() -> None:
    """Its gradients may be on their way from the training thread to its own loop."""
    cluster = missing_gradient()
    waiting_worker(cluster, state="held")
    cluster.task(W1)["main"]["seconds"] = 0.01
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.UNKNOWN


def test_a_worker_whose_gradients_follow_its_seal_is_in_no_deadlock() -> None:
    """It has made them; its GPU is slow to hand them over."""
    cluster = missing_gradient()
    waiting_worker(cluster, state="held")
    cluster.task(W1)["machines"]["role"]["sealed"] = STEP
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.UNKNOWN


def test_a_coordinator_that_waits_for_its_own_commit_is_in_no_deadlock() -> None:
    """It is one task with two machines: what it really waits for is the server that does not answer."""
    cluster = commit_lost()
    cluster.task(PS1)["waits"] = []
    cluster.task(PS0)["waits"] = [wait(PS0, WaitKind.COMMIT, 60.0, bucket=-1)]
    cluster.no_answer(PS1)  # to a question of 0.6 s, on a busy machine; its heartbeats come
    cluster.link(PS0, PS1)["heard"] = 0.2
    verdict = verdict_of(analyse(cluster.evidence()))
    assert verdict.cause is not Cause.DEADLOCK
    assert verdict.culprit == str(PS1)


@pytest.mark.parametrize(("unacknowledged", "cause"), [(0, Cause.UNKNOWN), (951, Cause.LINK_DOWN)])
def test_two_servers_that_are_cut_from_each_other_are_in_no_deadlock(unacknowledged: int, cause: Cause) -> None:
    """The second home goes on to the next step, for which a worker needs what its home may not let out yet."""
    cluster = healthy(servers=2)
    cluster.task(PS0)["waits"] = [wait(PS1, WaitKind.HOLDING, 3.2)]
    cluster.task(PS1)["waits"] = [wait(W0, key(W0, PS1, GRADIENT), 3.2, step=STEP + 1)]
    waiting_worker(cluster, W0, 3.2, state="confirmed")
    cluster.both_unheard(PS0, PS1, 3.2)
    for one, other in ((PS0, PS1), (PS1, PS0)):
        cluster.link(one, other)["kernel"].update(segments_in=0, waiting=unacknowledged)
    verdict = verdict_of(analyse(cluster.evidence()))
    assert (verdict.cause, verdict.peer, verdict.culprit) == (cause, str(PS0), str(PS1))


def test_a_checkpoint_that_is_being_written_is_only_a_warning() -> None:
    cluster = standing(missing_gradient(), "checkpoint", detail="/ckpt/model")
    cluster.task(W1)["disk"]["written_ago"] = 0.5
    verdict = verdict_of(analyse(cluster.evidence()))
    assert verdict.cause is Cause.STRAGGLER
    assert verdict.warning


def test_a_task_that_is_only_starved_of_the_processor_is_not_behind_a_cut_link() -> None:
    """Its heartbeats come late, but its kernel acknowledges for it: nothing waits for an acknowledgement."""
    cluster = missing_gradient()
    waiting_worker(cluster, state="produced")
    cluster.both_unheard(PS0, W1, 8.0)
    for one, other in ((PS0, W1), (W1, PS0)):
        cluster.link(one, other)["kernel"].update(segments_in=0, waiting=0)
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.UNKNOWN
    cluster.link(W1, PS0)["kernel"]["segments_in"] = 3
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.UNKNOWN


def test_a_tensor_is_lost_only_if_something_that_was_sent_later_has_arrived() -> None:
    """Else the link may have been cut just after it was sent; the kernel's counters show that a moment later."""
    cluster = gradient_lost()
    cluster.task(W1)["tensors"][0]["ages"]["sent"] = 2.3
    cluster.link(PS0, W1)["heard"] = 1.0
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.ANSWER_LOST
    cluster.link(PS0, W1)["heard"] = 2.2
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.UNKNOWN


def test_while_a_lost_worker_is_waited_for_the_remedy_is_to_start_it_again() -> None:
    """Not the whole job: it keeps the place of that worker."""
    cluster = dead()
    assert "start the job again" in verdict_of(analyse(cluster.evidence())).remedy
    cluster.task(PS0)["waits"].append(wait(W1, WaitKind.RETURN, 5.0, bucket=-1))
    verdict = verdict_of(analyse(cluster.evidence()))
    assert (verdict.cause, verdict.culprit) == (Cause.DEAD, str(W1))
    assert verdict.remedy == (
        "Start the same command again for worker 1: it takes its place again, and the job goes on."
    )


def test_why_a_task_was_refused_leads_also_after_its_monitor_has_left() -> None:
    cluster = never_started()
    assert lead_line(analyse(cluster.evidence())).endswith(
        "Worker 1 has not been started. Start it on that host, or correct its address in --ps_hosts and --worker_hosts."
    )
    cluster.link(PS0, W1)["last_end"] = "ended with exit code 2 (process 9 on b): there is no flag --modle"
    assert verdict_of(analyse(cluster.evidence())).cause is Cause.DEAD
    assert lead_line(analyse(cluster.evidence())).endswith(
        "Worker 1 has not joined: it ended with exit code 2 (process 9 on b): there is no flag --modle. Correct that, "
        "and start it again."
    )


def test_a_job_that_a_verdict_has_ended_is_not_healthy() -> None:
    """All tasks still answer for a moment, and nobody waits any more."""
    cluster = healthy()
    assert analyse(cluster.evidence()).healthy
    cluster.task(W0)["ended"] = {
        "culprit": str(W1),
        "step": STEP,
        "cause": Cause.FROZEN.value,
        "source": Source.VERDICT.value,
        "text": "was stopped",
    }
    evidence = cluster.evidence()
    diagnosis = analyse(replace(evidence, end=ended_by(evidence.tasks), asker="lockstep why"))
    assert not diagnosis.healthy
    verdict = verdict_of(diagnosis)
    assert (verdict.cause, verdict.culprit, verdict.step, verdict.peer) == (Cause.FROZEN, str(W1), STEP, "")
    assert lead_line(diagnosis).startswith(f"The job ended in step {STEP}. Worker 1 was stopped.")


def left_behind(cluster: Cluster, task: TaskId, exit_code: int, reason: str = "") -> None:
    """Of this task only its monitor is left."""
    cluster.no_answer(task)
    cluster.monitor(task)["description"].update(exited=True, exit_code=exit_code)
    cluster.monitor(task)["reason"] = reason


def test_a_job_of_which_only_monitors_are_left_is_over_and_neither_healthy_nor_without_a_fault() -> None:
    cluster = healthy()
    left_behind(cluster, PS0, EXIT_VERDICT)
    left_behind(cluster, W0, EXIT_VERDICT)
    left_behind(cluster, W1, 1, "no labels in step 7")
    diagnosis = analyse(cluster.evidence())
    assert not diagnosis.healthy
    lead, _, title, *_ = render(ReportKind.ANSWER, diagnosis).splitlines()
    assert lead == (
        "The job is over: worker 1 ended with exit code 1: no labels in step 7; server 0 ended with exit code 3; "
        "worker 0 ended with exit code 3."
    )
    assert title == "why: not every task answers"


def test_a_task_that_has_just_ended_is_named_before_anyone_waits_for_it() -> None:
    cluster = healthy()
    left_behind(cluster, W1, -9)
    diagnosis = analyse(cluster.evidence())
    assert not diagnosis.healthy
    assert diagnosis.summary.endswith("1 of 3 tasks do not answer: worker 1; worker 1 was killed by SIGKILL")


@pytest.mark.parametrize("seconds", [-0.04, -0.0, 0.0, 0.04])
def test_no_time_is_negative(seconds: float) -> None:
    assert (in_seconds(seconds), in_milliseconds(min(0.0, seconds))) == ("0.0 s", "0 ms")


def test_a_host_is_not_called_paused_while_anyone_hears_from_it_or_too_soon() -> None:
    assert verdict_of(analyse(host_paused().evidence())).cause is Cause.FROZEN
    heard = host_paused()
    heard.words[str(W1)][str(W0)] = Word.HEARS
    recent = host_paused()
    recent.link(PS0, W1)["heard"] = 2.5
    late = host_paused()
    late.monitor_silent[str(W1)] = Silence(Reach.NOT_ASKED, "there was no time to ask")
    for cluster in (heard, recent, late):
        assert verdict_of(analyse(cluster.evidence())).cause is Cause.UNKNOWN
    first_steps = host_paused().evidence(patience=30.0)
    assert verdict_of(analyse(first_steps)).cause is Cause.UNKNOWN


def test_a_task_that_refuses_connections_is_dead_only_by_proof_or_majority() -> None:
    """The same refusal, and what the others know of the task: only that differs."""
    cut, hears, none = Word.UNREACHABLE, Word.HEARS, Word.NONE
    for words, cause in (
        ({"ps0": cut, "worker0": cut}, Cause.DEAD),
        ({"ps0": cut, "worker0": Word.ABSENT}, Cause.DEAD),
        ({"ps0": cut, "worker0": none}, Cause.LINK_DOWN),
        ({"ps0": cut, "worker0": hears}, Cause.LINK_DOWN),
        ({"ps0": cut}, Cause.LINK_DOWN),
    ):
        cluster = missing_gradient()
        cluster.vanish(W1, Silence(Reach.REFUSED, "nothing listens there"), **words)
        assert verdict_of(analyse(cluster.evidence())).cause is cause, words


def test_large_packets_are_not_blamed_where_the_link_is_only_slow_or_all_packets_are_lost() -> None:
    slow, cut = large_packets_lost(), large_packets_lost()
    slow.link(W1, PS0)["kernel"]["retransmits"] = 2
    assert verdict_of(analyse(slow.evidence())).cause is Cause.SLOW_LINK
    cut.both_unheard(PS0, W1)
    cut.link(PS0, W1)["kernel"]["segments_in"] = 0
    assert verdict_of(analyse(cut.evidence())).cause is Cause.ONE_WAY_LINK


def test_large_packets_are_not_blamed_while_a_cut_heals_nor_where_only_acknowledgements_are_lost() -> None:
    for one, other, changed in ((W1, PS0, {"resent": 0}), (PS0, W1, {"quiet": 2.3}), (W1, PS0, {"segments_in": 0})):
        cluster = large_packets_lost()
        cluster.link(one, other)["kernel"].update(changed)
        assert verdict_of(analyse(cluster.evidence())).cause is not Cause.LINK_DOWN, changed
