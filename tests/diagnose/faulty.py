"""One made-up cluster for each cause: what the snapshots look like when it strikes."""

from __future__ import annotations

from collections.abc import Callable

from helpers.snapshots import (
    GRADIENT,
    MUTE,
    PARAMETER,
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
    tensor,
    wait,
    waiting_worker,
)
from lockstep.protocol.core.activity import TaskPhase
from lockstep.protocol.core.causes import Cause
from lockstep.protocol.core.death import Word
from lockstep.protocol.core.reach import Reach, Silence
from lockstep.protocol.core.waits import WaitKind

REFUSED = Silence(Reach.REFUSED, "nothing listens there")
NO_PACKETS = Silence(Reach.SILENT, "no packet came back")
NOT_LISTENING = Silence(Reach.BROKEN, "it does not listen")


def dead() -> Cluster:
    cluster = missing_gradient()
    cluster.no_answer(W1, NOT_LISTENING)
    cluster.monitor(W1)["description"].update(exited=True, exit_code=-9)
    return cluster


def closed_descriptors() -> Cluster:
    cluster = missing_gradient()
    cluster.no_answer(W1, NOT_LISTENING)
    cluster.monitor(W1)["description"].update(phase=TaskPhase.CUT_OFF.value, phase_seconds=2.0)
    return cluster


def dead_with_its_monitor() -> Cluster:
    cluster = missing_gradient()
    cluster.vanish(W1, REFUSED, ps0=Word.UNREACHABLE, worker0=Word.UNREACHABLE)
    return cluster


def dead_according_to_its_host() -> Cluster:
    cluster = missing_gradient()
    cluster.vanish(W1, REFUSED, ps0=Word.UNREACHABLE, worker0=Word.ABSENT)
    return cluster


def reset_by_a_firewall() -> Cluster:
    cluster = missing_gradient()
    cluster.vanish(W1, REFUSED, ps0=Word.UNREACHABLE, worker0=Word.HEARS)
    return cluster


def refused_in_a_job_of_two() -> Cluster:
    cluster = missing_gradient()
    del cluster.tasks[str(W0)]
    cluster.vanish(W1, REFUSED, ps0=Word.UNREACHABLE)
    return cluster


def host_paused() -> Cluster:
    cluster = missing_gradient()
    cluster.vanish(W1, MUTE, ps0=Word.NONE, worker0=Word.NONE)
    return cluster


def out_of_memory() -> Cluster:
    cluster = dead()
    cluster.monitor(W1)["out_of_memory"] = "memory.events counts one out-of-memory kill just now"
    return cluster


def frozen() -> Cluster:
    cluster = missing_gradient()
    cluster.no_answer(W1)
    cluster.monitor(W1).update(process={"state": "stopped"}, stopped_seconds=4.0)
    return cluster


def holds_the_interpreter() -> Cluster:
    cluster = missing_gradient()
    cluster.no_answer(W1)
    cluster.monitor(W1).update(process={"state": "running"}, on_device=True)
    return cluster


def forming(what: WaitKind = WaitKind.JOINING) -> Cluster:
    cluster = healthy()
    for name in (PS0, W0, W1):
        cluster.task(name).update(job="0" * 16, step=-1)
        cluster.monitor(name)["description"]["job"] = 0
    cluster.task(PS0)["waits"] = [wait(W1, what, 5.0, step=-1, bucket=-1)]
    return cluster


def never_started() -> Cluster:
    cluster = forming()
    cluster.no_answer(W1, REFUSED)
    cluster.monitor_silent[str(W1)] = REFUSED
    return cluster


def wiring() -> Cluster:
    cluster = forming()
    cluster.no_answer(W1, NOT_LISTENING)
    cluster.monitor(W1)["description"]["task"] = str(W0)
    return cluster


def version() -> Cluster:
    cluster = forming()
    cluster.no_answer(W1, NOT_LISTENING)
    cluster.monitor(W1)["description"]["version"] = "0.9"
    return cluster


def leftover() -> Cluster:
    cluster = forming()
    for name in (W0, W1):
        cluster.task(name)["waits"] = [wait(PS0, WaitKind.CONNECTION, 5.0, step=-1, bucket=-1)]
    cluster.task(PS0)["waits"] = []
    cluster.no_answer(PS0)
    cluster.monitor(PS0)["description"]["job"] = 0xDEAD
    return cluster


def duplicate() -> Cluster:
    cluster = forming()
    cluster.task(PS0)["waits"] = []
    cluster.task(W1)["waits"] = [wait(PS0, WaitKind.CONNECTION, 5.0, step=-1, bucket=-1)]
    cluster.link(W1, PS0)["refusal"] = Cause.DUPLICATE_TASK.value
    return cluster


def stale() -> Cluster:
    cluster = missing_gradient()
    cluster.no_answer(W1)
    cluster.monitor(W1)["description"]["incarnation"] = 0x999
    return cluster


def out_of_step() -> Cluster:
    cluster = missing_gradient()
    cluster.task(PS0)["machines"]["role"]["workers"][1]["done"] = STEP
    return standing(cluster, "finishing", where="")


def user_code() -> Cluster:
    return standing(missing_gradient(), "computing")


def device_call() -> Cluster:
    return standing(missing_gradient(), "computing", where="device call", cpu=1.0)


def input_starved() -> Cluster:
    return standing(missing_gradient(), "input", detail="/data/train-0001")


def checkpoint_stuck() -> Cluster:
    cluster = standing(missing_gradient(), "checkpoint", detail="/ckpt/model")
    cluster.task(W1)["disk"]["written_ago"] = 4.0
    return cluster


def disk_full() -> Cluster:
    cluster = standing(missing_gradient(), "checkpoint", detail="/ckpt/model")
    cluster.task(W1)["disk"].update(free=0, written_ago=4.0)
    return cluster


def looping() -> Cluster:
    cluster = standing(missing_gradient(), "computing", cpu=0.95)
    cluster.task(W1)["main"]["dwells"] = {"place": "f (train.py:12-13)", "seconds": 2.0, "innermost": True}
    return cluster


def busy() -> Cluster:
    return standing(missing_gradient(), "busy", detail="evaluation")


def compiling() -> Cluster:
    return standing(missing_gradient(), "computing", where="compiler")


def native_code_without_a_device() -> Cluster:
    cluster = holds_the_interpreter()
    cluster.monitor(W1)["on_device"] = False
    return cluster


def straggler() -> Cluster:
    return standing(missing_gradient(), "computing", cpu=0.95)


def callback() -> Cluster:
    cluster = missing_gradient()
    waiting_worker(cluster)
    cluster.task(W1)["tensors"] = [tensor("gradient", STEP, 0, PS0, in_flight=5.0, sent=4.9)]
    cluster.link(PS0, W1)["callback"] = {"name": "a gradient arrived", "seconds": 4.0, "stack": ["copy (x.py:1)"]}
    return cluster


def loop() -> Cluster:
    cluster = missing_gradient()
    waiting_worker(cluster, state="produced")
    cluster.task(W1)["machines"]["role"]["servers"][0]["open_step"] = STEP - 1
    cluster.task(W1)["loop"] = {"busy": 4.0, "what": "Received", "queued": 3, "stack": ["hold (x.py:1)"]}
    return cluster


def transfer_stands() -> Cluster:
    cluster = missing_gradient()
    waiting_worker(cluster)
    cluster.link(W1, PS0)["moving"] = [{"step": STEP, "bucket": 0, "bytes": 4096, "seconds": 4.0}]
    return cluster


def rdma_down() -> Cluster:
    cluster = transfer_stands()
    cluster.link(W1, PS0)["rdma"] = True
    return cluster


def store_stuck() -> Cluster:
    cluster = _server_updates()
    cluster.task(PS0)["store"] = {"doing": "the update", "busy": 4.0, "queued": 1, "cpu": 0.0, "where": "communication"}
    return cluster


def _server_updates() -> Cluster:
    cluster = healthy()
    for name in (W0, W1):
        waiting_worker(cluster, name, state="confirmed")
    return cluster


def overloaded() -> Cluster:
    cluster = _server_updates()
    cluster.task(PS0)["store"] = {"doing": "the update", "busy": 4.0, "queued": 5, "cpu": 0.9, "where": "user code"}
    return cluster


def request_lost() -> Cluster:
    cluster = missing_gradient()
    waiting_worker(cluster, state="produced")
    cluster.task(W1)["machines"]["role"]["servers"][0]["open_step"] = STEP - 1
    return cluster


def pull_lost() -> Cluster:
    cluster = healthy()
    waiting_worker(cluster, W1, state="confirmed")
    ps = cluster.task(PS0)["machines"]["role"]
    ps["buckets"][0]["version"] = STEP + 1
    ps["workers"][1]["pulls"] = STEP
    cluster.task(W1)["tensors"] = [tensor("parameter", STEP + 1, -1, PS0, requested=5.0)]
    return cluster


def gradient_lost() -> Cluster:
    cluster = missing_gradient()
    waiting_worker(cluster)
    cluster.task(W1)["tensors"] = [tensor("gradient", STEP, 0, PS0, in_flight=5.0, sent=4.9)]
    return cluster


def parameter_lost() -> Cluster:
    cluster = healthy()
    waiting_worker(cluster, W1, state="confirmed")
    cluster.task(PS0)["machines"]["role"]["buckets"][0]["version"] = STEP + 1
    cluster.task(PS0)["tensors"] = [tensor("parameter", STEP + 1, 0, W1, in_flight=5.0, sent=4.9)]
    return cluster


def commit_lost() -> Cluster:
    cluster = healthy(servers=2)
    for name in (PS0, PS1):
        cluster.task(name)["step"] = STEP + 1
        cluster.task(name)["machines"]["role"].update(step=STEP + 1, committed=STEP)
    cluster.task(PS1)["waits"] = [wait(PS0, WaitKind.COMMIT, 5.0, bucket=-1)]
    cluster.task(PS1)["machines"]["role"]["committed"] = STEP - 1
    return cluster


def link_down() -> Cluster:
    cluster = missing_gradient(servers=2)
    waiting_worker(cluster, state="produced")
    cluster.both_unheard(PS0, W1)
    for one, other in ((PS0, W1), (W1, PS0)):
        cluster.link(one, other)["kernel"].update(segments_in=0, waiting=60)
    return cluster


def host_unreachable() -> Cluster:
    cluster = missing_gradient()
    cluster.no_answer(W1, NO_PACKETS)
    cluster.monitor_silent[str(W1)] = NO_PACKETS
    return cluster


def one_way() -> Cluster:
    cluster = link_down()
    cluster.link(W1, PS0)["kernel"]["segments_in"] = 3
    return cluster


def slow_link() -> Cluster:
    cluster = gradient_lost()
    cluster.link(W1, PS0)["kernel"]["waiting"] = 900_000
    return cluster


def large_packets_lost() -> Cluster:
    cluster = slow_link()
    cluster.link(W1, PS0)["kernel"].update(retransmits=4, resent=1, stuck=900_000, path_mtu=1500)
    return cluster


def deadlock() -> Cluster:
    cluster = missing_gradient()
    waiting_worker(cluster, state="held")
    return cluster


CALL = "all_reduce 'loss' (train.py:31)"


def call(seconds: float = 6.0) -> Cluster:
    """Worker 0 waits in a call to which worker 1 has not come; the coordinator knows that too."""
    cluster = healthy()
    missing = {**wait(W1, WaitKind.CALL, seconds, bucket=-1, names=[], state="it has not come"), "what": CALL}
    cluster.task(W0)["waits"] = [missing]
    cluster.task(W0)["main"] = {"doing": "in a call", "detail": CALL, "seconds": seconds, "cpu": 0.0}
    cluster.task(W0)["machines"]["call"] = {"place": [1, STEP, 0], "open": True}
    gradients = [wait(one, key(one, PS0, GRADIENT), 4.0) for one in (W0, W1)]
    cluster.task(PS0)["waits"] = [*gradients, {**missing, "kind": WaitKind.CALLER.value}]
    return cluster


def missed_call() -> Cluster:
    """Worker 1 waits for a version that needs worker 0's gradient."""
    cluster = call()
    waiting_worker(cluster, seconds=4.0)
    cluster.task(PS0)["waits"] = cluster.task(PS0)["waits"][:1]
    return cluster


def stuck_before_a_call() -> Cluster:
    return standing(call(), "user code")


def frozen_before_a_call() -> Cluster:
    cluster = call()
    cluster.no_answer(W1)
    cluster.monitor(W1).update(process={"state": "stopped"}, stopped_seconds=4.0)
    return cluster


def dead_before_a_call() -> Cluster:
    cluster = call()
    cluster.no_answer(W1, NOT_LISTENING)
    cluster.monitor(W1)["description"].update(exited=True, exit_code=-9)
    return cluster


Faulty = tuple[Cause, Callable[[], Cluster], frozenset[str], str]


def _row(cause: Cause, make: Callable[[], Cluster], one: object, other: object, contains: str) -> Faulty:
    return cause, make, frozenset({str(one), str(other)}), contains


FAULTY: tuple[Faulty, ...] = (
    _row(Cause.DEAD, dead, W1, PS0, GRADIENT),
    _row(Cause.DEAD, dead_with_its_monitor, W1, PS0, GRADIENT),
    _row(Cause.DEAD, dead_according_to_its_host, W1, PS0, GRADIENT),
    _row(Cause.LINK_DOWN, reset_by_a_firewall, W1, PS0, GRADIENT),
    _row(Cause.LINK_DOWN, refused_in_a_job_of_two, W1, PS0, GRADIENT),
    _row(Cause.FROZEN, host_paused, W1, PS0, GRADIENT),
    _row(Cause.OUT_OF_MEMORY, out_of_memory, W1, PS0, GRADIENT),
    _row(Cause.FROZEN, frozen, W1, PS0, GRADIENT),
    _row(Cause.COMMUNICATION, closed_descriptors, W1, PS0, GRADIENT),
    _row(Cause.DEVICE_CALL, holds_the_interpreter, W1, PS0, GRADIENT),
    _row(Cause.NEVER_STARTED, never_started, W1, PS0, WaitKind.JOINING),
    _row(Cause.WIRING, wiring, W1, PS0, WaitKind.JOINING),
    _row(Cause.MISMATCH, version, W1, PS0, WaitKind.JOINING),
    _row(Cause.LEFTOVER_SERVER, leftover, W0, PS0, WaitKind.CONNECTION),
    _row(Cause.DUPLICATE_TASK, duplicate, W1, PS0, WaitKind.CONNECTION),
    _row(Cause.STALE_INCARNATION, stale, W1, PS0, GRADIENT),
    _row(Cause.OUT_OF_STEP, out_of_step, W1, PS0, GRADIENT),
    _row(Cause.USER_CODE, user_code, W1, PS0, GRADIENT),
    _row(Cause.DEVICE_CALL, device_call, W1, PS0, GRADIENT),
    _row(Cause.INPUT_STARVED, input_starved, W1, PS0, GRADIENT),
    _row(Cause.CHECKPOINT_STUCK, checkpoint_stuck, W1, PS0, GRADIENT),
    _row(Cause.DISK_FULL, disk_full, W1, PS0, GRADIENT),
    _row(Cause.USER_CODE, native_code_without_a_device, W1, PS0, GRADIENT),
    _row(Cause.LOOPING, looping, W1, PS0, GRADIENT),
    _row(Cause.BUSY, busy, W1, PS0, GRADIENT),
    _row(Cause.COMPILING, compiling, W1, PS0, GRADIENT),
    _row(Cause.STRAGGLER, straggler, W1, PS0, GRADIENT),
    _row(Cause.COMMUNICATION, callback, W1, PS0, GRADIENT),
    _row(Cause.COMMUNICATION, loop, W1, PS0, GRADIENT),
    _row(Cause.COMMUNICATION, transfer_stands, W1, PS0, GRADIENT),
    _row(Cause.COMMUNICATION, store_stuck, W0, PS0, PARAMETER),
    _row(Cause.OVERLOADED_SERVER, overloaded, W0, PS0, PARAMETER),
    _row(Cause.REQUEST_LOST, request_lost, W1, PS0, GRADIENT),
    _row(Cause.REQUEST_LOST, pull_lost, W1, PS0, PARAMETER),
    _row(Cause.ANSWER_LOST, gradient_lost, W1, PS0, GRADIENT),
    _row(Cause.ANSWER_LOST, parameter_lost, W1, PS0, PARAMETER),
    _row(Cause.ANSWER_LOST, commit_lost, PS1, PS0, WaitKind.COMMIT),
    _row(Cause.LINK_DOWN, link_down, W1, PS0, GRADIENT),
    _row(Cause.LINK_DOWN, host_unreachable, W1, PS0, GRADIENT),
    _row(Cause.LINK_DOWN, rdma_down, W1, PS0, GRADIENT),
    _row(Cause.ONE_WAY_LINK, one_way, W1, PS0, GRADIENT),
    _row(Cause.LINK_DOWN, large_packets_lost, W1, PS0, GRADIENT),
    _row(Cause.SLOW_LINK, slow_link, W1, PS0, GRADIENT),
    _row(Cause.DEADLOCK, deadlock, W1, PS0, GRADIENT),
    _row(Cause.OTHER_CALL, missed_call, W1, W0, CALL),
    _row(Cause.USER_CODE, stuck_before_a_call, W1, W0, CALL),
    _row(Cause.FROZEN, frozen_before_a_call, W1, W0, CALL),
    _row(Cause.DEAD, dead_before_a_call, W1, W0, CALL),
)


def keys() -> str:
    """The key of what is missing in most of them."""
    return key(W1, PS0, GRADIENT)
