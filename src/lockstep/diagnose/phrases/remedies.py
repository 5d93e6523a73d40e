"""What to do about each cause: one or two sentences a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lockstep.protocol.core.causes import Cause

REMEDIES: Mapping[Cause, str] = MappingProxyType(
    {
        Cause.NEVER_STARTED: "start it on that host, or correct its address in --ps_hosts and --worker_hosts.",
        Cause.DEAD: "read the last lines of that task; the job has to be started again.",
        Cause.OUT_OF_MEMORY: "give the task more memory, a smaller --batch_size, or more servers to share the model.",
        Cause.FROZEN: "let it go on with 'kill -CONT PID' on its host, or end it; a debugger may hold it.",
        Cause.STOPPED: "somebody or a batch system ended it; started again, it goes on from its newest checkpoint.",
        Cause.FAILED: "correct the error that is named above; the job has to be started again.",
        Cause.USER_CODE: "look at the stack above: that line of the training program does not return.",
        Cause.DEVICE_CALL: "look at the stack above and at the device (nvidia-smi, dmesg).",
        Cause.COMMUNICATION: "look at the stack above: code that runs in a callback must not wait; please report it.",
        Cause.INPUT_STARVED: "look at that file and at the disk or network it comes from.",
        Cause.CHECKPOINT_STUCK: "look at the file system of that folder (df, mount); write checkpoints elsewhere.",
        Cause.DISK_FULL: "make room on that disk, or give --train_dir another folder.",
        Cause.REQUEST_LOST: "it is asked for again; if that does not help, keep the run folder: this is a defect.",
        Cause.ANSWER_LOST: "it is sent again after ten seconds; if that does not help, keep the run folder.",
        Cause.LINK_DOWN: (
            "try to reach one host from the other (ping, nc; for RDMA ib_write_bw); look for a firewall, a cable or a "
            "route."
        ),
        Cause.NO_PATH: "use --server_protocol=auto, or correct what keeps the two from using that transport.",
        Cause.ONE_WAY_LINK: "look for a firewall rule or a route that lets packets through in one direction only.",
        Cause.SLOW_LINK: "measure the network between the two hosts (iperf3); look for a shared or a wrong interface.",
        Cause.STRAGGLER: "compare that host with the others: other programs on it, its clock rate, its data.",
        Cause.OUT_OF_STEP: "give every worker the same number of steps, or let the input repeat.",
        Cause.MISMATCH: "start all tasks with the same program, model and settings.",
        Cause.WIRING: "give all tasks the same host lists, and each host the --task_index of its place there.",
        Cause.STALE_INCARNATION: "start the whole job again: what the former life of the task held is gone.",
        Cause.LEFTOVER_SERVER: "end the older job on that host, or use other ports.",
        Cause.DUPLICATE_TASK: "end one of the two, or give it a --task_index of its own.",
        Cause.DEADLOCK: "call backward (or produce all gradients) before waiting for the next parameters.",
        Cause.OVERLOADED_SERVER: "use more servers (--ps), or a host with more cores for this one.",
        Cause.UNKNOWN: "compare what each side saw; 'lockstep why' asks again, and the run folder has the journals.",
    }
)


def remedy(cause: Cause) -> str:
    return REMEDIES[cause]
