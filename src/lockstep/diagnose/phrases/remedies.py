"""What to do about each cause: one or two sentences that a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lockstep.diagnose.phrases.units import named as _named
from lockstep.protocol.core.causes import Cause

REMEDIES: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.NEVER_STARTED: "Start it on that host, or correct its address in --ps_hosts and --worker_hosts.",
        Cause.DEAD: "Read the last lines of its output, then start the job again.",
        Cause.OUT_OF_MEMORY: "Give the task more memory, a smaller --batch_size, or more servers to share the model.",
        Cause.FROZEN: "Resume it, or its host, or end it; a debugger or a suspended machine may be holding it.",
        Cause.STOPPED: "A person or a batch system ended it. Start it again: it resumes from its newest checkpoint.",
        Cause.FAILED: "Fix that error, then start the job again.",
        Cause.USER_CODE: "See the stack below: that line of the training program does not return.",
        Cause.LOOPING: "See the stack below: that loop of the training program does not end, or takes very long.",
        Cause.BUSY: "The job waits for it as long as it takes.",
        Cause.COMPILING: "The job waits for it as long as it takes.",
        Cause.DEVICE_CALL: "See the stack below, and check the device (nvidia-smi, dmesg).",
        Cause.COMMUNICATION: "See the stack below. Please report this as a bug, with the run folder.",
        Cause.INPUT_STARVED: "Check that file, and the disk or network that it comes from.",
        Cause.CHECKPOINT_STUCK: "Check the file system of that folder (df, mount), or write checkpoints elsewhere.",
        Cause.DISK_FULL: "Free space on that disk, or set --train_dir to another folder.",
        Cause.REQUEST_LOST: "The request is repeated. If that does not help, keep the run folder and report a bug.",
        Cause.ANSWER_LOST: "It is sent again after ten seconds. If that does not help, keep the run folder.",
        Cause.LINK_DOWN: (
            "Try to reach one host from the other (ping, nc; ib_write_bw for RDMA), and look for a firewall, a cable "
            "or a route. If only large packets are lost (ping -M do -s 1472), lower the MTU of the interfaces."
        ),
        Cause.NO_PATH: "Use --server_protocol=auto, or fix what keeps the two from using that transport.",
        Cause.ONE_WAY_LINK: "Look for a firewall rule or a route that lets packets through in one direction only.",
        Cause.SLOW_LINK: "Measure the network between the two hosts (iperf3); look for a shared or wrong interface.",
        Cause.STRAGGLER: "Compare that host with the others: other programs on it, its clock rate, its data.",
        Cause.DRIFTED: "Let every worker change its parameters in the same way: the same optimizer, options and "
        "schedule, and nothing that only one of them does, such as loading a file or editing a gradient.",
        Cause.HOMES_DIFFER: "Compare the two servers that are named: their hosts' memory (dmesg -T, a memory test), "
        "processors and torch. Then start again, from a checkpoint that is at least 50 steps older.",
        Cause.OUT_OF_STEP: "Look for what one worker leaves out and the others do not (continue, break, an exception "
        "that is caught), and for a worker with less data.",
        Cause.MISMATCH: "Start all tasks with the same program, model and settings.",
        Cause.WIRING: "Give all tasks the same host lists, and each host the --task_index of its place in them.",
        Cause.STALE_INCARNATION: "Start the whole job again: the state of the earlier incarnation is gone.",
        Cause.LEFTOVER_SERVER: "End the older job on that host, or use other ports.",
        Cause.DUPLICATE_TASK: "End one of the two, or give it its own --task_index.",
        Cause.DEADLOCK: "Call backward (or produce all gradients) before waiting for the next parameters.",
        Cause.NOT_ENTERED: "Look at that rank: its last lines of output, and its stack (py-spy dump --pid PID).",
        Cause.OTHER_CALL: "Let every rank make the same calls in the same order, with the same sizes and dtypes.",
        Cause.OVERLOADED_SERVER: "Use more servers (--ps), or run this one on a host with more cores.",
        Cause.UNKNOWN: "Compare what each side saw; 'lockstep why' asks again, and the run folder has the journals.",
    }
)


def remedy(cause: Cause, pid: int = 0) -> str:
    if cause is Cause.FROZEN and pid:
        return f"Resume it with: kill -CONT {pid}"
    return REMEDIES[cause]


def remedy_while_waited_for(culprit: str) -> str:
    """The job keeps its place: only this task has to start."""
    return f"Start the same command again for {_named(culprit)}: it takes its place again, and the job goes on."


def remedy_of_a_busy_share() -> str:
    """Of a worker that averages gradients, where there is no server."""
    return "Run this worker on a host with more cores, or fewer workers on that host."


def remedy_of_a_missed_call() -> str:
    return "Let all workers make the same calls and the same steps in the same order."


def remedy_of_a_failed_start() -> str:
    return "Correct that, and start it again."
