"""About one tensor between two tasks that both answer: what each side saw of it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.diagnose.evidence import is_worker as _is_worker
from lockstep.diagnose.phrases.units import in_seconds as _in_seconds
from lockstep.diagnose.phrases.units import named as _named
from lockstep.protocol.core.waits import WaitKind


def _kind(kind: str, task: str) -> str:
    """What comes from a worker, where there is no server, is not a parameter but the mean of its gradients."""
    return "mean" if kind == WaitKind.PARAMETER and _is_worker(task) else kind


# -- what is lost --


def request_never_came(waiter: str, task: str, kind: str, step: int) -> str:
    asked = f"{_named(waiter)} asked {_named(task)} for the {_kind(kind, task)}s of step {step}"
    return f"{asked}, but the request never arrived"


def asked_times(waiter: str, times: int, seconds: float) -> str:
    return f"{_named(waiter)}: asked {times} times, first {_in_seconds(seconds)} ago"


def never_saw_the_request_for_step(task: str, newest: int) -> str:
    return f"{_named(task)}: never received it; its newest request is for step {newest}"


def never_saw_the_request_for_version(task: str, newest: int) -> str:
    return f"{_named(task)}: never received it; its newest request is for version {newest}"


def heartbeats_pass() -> str:
    return "heartbeats pass in both directions"


def commit_is_lost(step: int, waiter: str, task: str) -> str:
    return f"the commit of step {step} was lost between {_named(task)} and {_named(waiter)}"


def word_of_applying_is_lost(step: int, waiter: str, task: str) -> str:
    return f"the message that step {step} is applied was lost between {_named(waiter)} and {_named(task)}"


def is_applied_everywhere(step: int) -> str:
    return f"step {step} is applied everywhere"


def has_committed(task: str, step: int) -> str:
    return f"{_named(task)} has committed step {step}"


def tensor_never_arrived(task: str, kind: str, bucket: int, step: int) -> str:
    return f"{_named(task)} sent {_kind(kind, task)} bucket {bucket} of step {step}, but it never arrived"


def was_sent(task: str, in_flight_ago: float, sent_ago: float) -> str:
    return f"{_named(task)}: in flight {_in_seconds(in_flight_ago)} ago, sent {_in_seconds(sent_ago)} ago"


def expected_it(waiter: str) -> str:
    return f"{_named(waiter)}: expected it; it never arrived"


# -- what is slow, or stuck --


def link_is_slow_in_the_kernel(task: str, waiter: str, waiting: int) -> str:
    return f"the link from {_named(task)} to {_named(waiter)} is slow: {waiting} bytes are queued in its host's kernel"


def kernel_holds(task: str, waiting: int, waiter: str) -> str:
    return f"{_named(task)}: its kernel holds {waiting} bytes that {_named(waiter)} has not acknowledged"


def link_is_slow(task: str, waiter: str, nbytes: int) -> str:
    return f"the link from {_named(task)} to {_named(waiter)} is slow: {nbytes} bytes are still in flight"


def bucket_left(task: str, bucket: int, step: int, seconds: float) -> str:
    return f"{_named(task)}: bucket {bucket} of step {step} left {_in_seconds(seconds)} ago"


def rate_of_late(kibibytes: float) -> str:
    return f"about {kibibytes:.0f} KiB per second moved in the last two seconds"


def transfer_stands_still(task: str, waiter: str, bucket: int, nbytes: int) -> str:
    return f"a transfer from {_named(task)} to {_named(waiter)} is stuck: bucket {bucket}, {nbytes} bytes"


def transfer_stands_since(task: str, seconds: float) -> str:
    return f"{_named(task)}: started {_in_seconds(seconds)} ago; no byte moved in the last two seconds"


def nothing_passes_by_rdma(task: str, waiter: str) -> str:
    return f"{_named(task)} and {_named(waiter)} hear each other, but nothing passes between them over RDMA"


def heartbeats_pass_by_tcp() -> str:
    return "heartbeats, which use TCP, pass in both directions"


def sum_does_not_come(bucket: int, names: Sequence[str], step: int) -> str:
    listed = f" ({', '.join(names)})" if names else ""
    return (
        f"all workers have handed over bucket {bucket}{listed} of step {step}, but its sum does not arrive: "
        "the network between two of them is cut or very slow"
    )


def has_handed_over(task: str, bucket: int, step: int) -> str:
    return f"{_named(task)}: has handed over bucket {bucket} of step {step}"


def large_packets_vanish(speaker: str, listener: str) -> str:
    return (
        f"large packets from {_named(speaker)} to {_named(listener)} vanish, small ones arrive: some part of the path "
        "takes smaller packets than both hosts assume (MTU)"
    )


def sent_again(speaker: str, nbytes: int, times: int, path_mtu: int) -> str:
    return (
        f"{_named(speaker)}: its kernel has retransmitted one segment {times} times without an answer; {nbytes} bytes "
        f"wait on that connection, whose path MTU is {path_mtu} bytes as far as that kernel knows"
    )


def small_packets_arrive(listener: str, segments: int, seconds: float) -> str:
    return f"{_named(listener)}: its kernel received {segments} segments from the other host in {_in_seconds(seconds)}"
