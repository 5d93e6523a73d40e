"""About one tensor between two tasks that both answer: what each side saw of it."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.diagnose.phrases.units import in_seconds as _in_seconds

# -- what is lost --


def request_never_came(waiter: str, task: str, kind: str, step: int) -> str:
    return f"{waiter} asked {task} for {kind}s of step {step}, and the request never came"


def asked_times(waiter: str, times: int, seconds: float) -> str:
    return f"{waiter}: asked {times} times, first {_in_seconds(seconds)} ago"


def never_saw_the_request_for_step(task: str, newest: int) -> str:
    return f"{task}: never saw it; the newest request it saw is for step {newest}"


def never_saw_the_request_for_version(task: str, newest: int) -> str:
    return f"{task}: never saw it; the newest request it saw is for version {newest}"


def heartbeats_pass() -> str:
    return "heartbeats pass in both directions"


def commit_is_lost(step: int, waiter: str, task: str) -> str:
    return f"the commit of step {step} is lost between {waiter} and {task}"


def word_of_applying_is_lost(step: int, waiter: str, task: str) -> str:
    return f"its word that it has applied of step {step} is lost between {waiter} and {task}"


def every_server_has_applied(step: int) -> str:
    return f"every server has applied step {step}"


def has_committed(task: str, step: int) -> str:
    return f"{task} has committed step {step}"


def tensor_never_arrived(task: str, kind: str, bucket: int, step: int) -> str:
    return f"{task} sent {kind} bucket {bucket} of step {step}, and it never arrived"


def was_sent(task: str, in_flight_ago: float, sent_ago: float) -> str:
    return f"{task}: in flight {_in_seconds(in_flight_ago)} ago, sent {_in_seconds(sent_ago)} ago"


def expected_it(waiter: str) -> str:
    return f"{waiter}: expected, never arrived"


# -- what is slow, or stands still --


def link_is_slow_in_the_kernel(task: str, waiter: str, waiting: int) -> str:
    return f"the link from {task} to {waiter} is slow: {waiting} bytes wait in the kernel of its host"


def kernel_holds(task: str, waiting: int, waiter: str) -> str:
    return f"{task}: its kernel holds {waiting} bytes that {waiter} has not acknowledged"


def link_is_slow(task: str, waiter: str, nbytes: int) -> str:
    return f"the link from {task} to {waiter} is slow: {nbytes} bytes are under way"


def bucket_left(task: str, bucket: int, step: int, seconds: float) -> str:
    return f"{task}: bucket {bucket} of step {step} left {_in_seconds(seconds)} ago"


def rate_of_late(kibibytes: float) -> str:
    return f"about {kibibytes:.0f} KiB a second moved in the last two seconds"


def transfer_stands_still(task: str, waiter: str, bucket: int, nbytes: int) -> str:
    return f"a transfer from {task} to {waiter} stands still: bucket {bucket}, {nbytes} bytes"


def transfer_stands_since(task: str, seconds: float) -> str:
    return f"{task}: started {_in_seconds(seconds)} ago, no byte moved in the last two seconds"


def nothing_passes_by_rdma(task: str, waiter: str) -> str:
    return f"{task} and {waiter} hear each other, but nothing passes between them by RDMA"


def heartbeats_pass_by_tcp() -> str:
    return "heartbeats, which go by TCP, pass in both directions"


def sum_does_not_come(bucket: int, names: Sequence[str], step: int) -> str:
    named = f" ({', '.join(names)})" if names else ""
    return (
        f"all workers have handed over bucket {bucket}{named} of step {step}, and its sum does not come: "
        "the network between two of them is cut or very slow"
    )


def has_handed_over(task: str, bucket: int, step: int) -> str:
    return f"{task}: has handed over bucket {bucket} of step {step}"
