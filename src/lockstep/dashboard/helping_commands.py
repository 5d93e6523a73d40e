"""The command that helps with each cause: something to copy, with the host, process and address already in it."""

from __future__ import annotations

import shlex

from lockstep.diagnose.verdict import Verdict
from lockstep.protocol.core.causes import Cause

_AT_A_PROCESS = {
    Cause.FROZEN: "kill -CONT {pid}",
    Cause.USER_CODE: "py-spy dump --pid {pid}",
    Cause.LOOPING: "py-spy dump --pid {pid}",
    Cause.COMMUNICATION: "py-spy dump --pid {pid}",
    Cause.DEVICE_CALL: "nvidia-smi && py-spy dump --native --pid {pid}",
    Cause.NOT_ENTERED: "py-spy dump --pid {pid}",
    Cause.STRAGGLER: "top -H -b -n 1 -p {pid}",
    Cause.OVERLOADED_SERVER: "top -H -b -n 1 -p {pid}",
    Cause.COMPILING: "py-spy dump --pid {pid}",
    Cause.BUSY: "py-spy dump --pid {pid}",
}
_ON_A_HOST = {
    Cause.OUT_OF_MEMORY: "free -h; dmesg -T | grep -i oom | tail -3",
    Cause.DISK_FULL: "df -h",
    Cause.CHECKPOINT_STUCK: "df -h; dmesg -T | tail -20",
    Cause.INPUT_STARVED: "df -h; dmesg -T | tail -20",
}
_OF_A_NETWORK = frozenset({Cause.LINK_DOWN, Cause.ONE_WAY_LINK, Cause.SLOW_LINK, Cause.NO_PATH})
_OF_A_START = frozenset(
    {Cause.NEVER_STARTED, Cause.WIRING, Cause.MISMATCH, Cause.DUPLICATE_TASK, Cause.LEFTOVER_SERVER}
)


def helping_command(verdict: Verdict, address: str, here: str) -> str:
    """One line for a shell, or "" where a command does not help. ``address``: the culprit's; ``here``: this host."""
    cause, pid = verdict.cause, verdict.pid
    if cause in _AT_A_PROCESS and pid:
        return _on(verdict.host, here, _AT_A_PROCESS[cause].format(pid=pid))
    if cause in _ON_A_HOST:
        return _on(verdict.host, here, _ON_A_HOST[cause])
    host = address.rpartition(":")[0]
    if cause in _OF_A_NETWORK and host:
        return f"lockstep net --serve   # on {host}, then here: lockstep net {host}:4600"
    if cause in _OF_A_START:
        return "lockstep doctor   # with the flags of the job"
    return ""


def _on(host: str, here: str, command: str) -> str:
    return command if not host or host == here else f"ssh {shlex.quote(host)} {shlex.quote(command)}"
