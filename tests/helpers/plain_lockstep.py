"""The ``lockstep`` command with tasks that import no torch and train nothing, for tests of how a cluster forms.

Everything up to the first step is the real thing: flags, checks, monitor, node, handshake. ``bench`` tasks print
"formed" once they are members; workers then finish at once or, with PLAIN_HOLD set, when the job ends.
PLAIN_VERSION makes this process another version of Lockstep.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

import lockstep.version

if TYPE_CHECKING:
    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.task.node import Node
    from lockstep.runtime.task.outcome import Outcome

lockstep.version.__version__ = os.environ.get("PLAIN_VERSION", lockstep.version.__version__)


def main(words: Sequence[str]) -> int:
    from lockstep.cli import bench
    from lockstep.cli import main as command
    from lockstep.cli.flags import parse_bench
    from lockstep.errors import BadInput

    if words[0] != "bench":
        return command.main(words)
    flags = words[1:]
    try:
        if flags and flags[0].startswith(bench.TASK_FLAG):
            return run_task(flags[1:], int(flags[0].removeprefix(bench.TASK_FLAG)))
        parse_bench(flags, os.environ)
        return bench.start(flags, (sys.executable, __file__))
    except BadInput as bad:
        sys.stderr.write("".join(f"lockstep: {sentence}\n" for sentence in bad.sentences))
        return 2


def run_task(flags: Sequence[str], report_fd: int) -> int:
    from lockstep.cli.bench_task import node_config
    from lockstep.cli.flags import parse_bench
    from lockstep.protocol.core.ids import Role
    from lockstep.runtime.monitor.reporter import TaskReporter
    from lockstep.runtime.task.server_node import ServerNode
    from lockstep.runtime.task.worker_node import WorkerNode
    from lockstep.terminal import say_over as say

    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = node_config(parse_bench(flags, os.environ))
    reporter = TaskReporter(report_fd)
    node: ServerNode | WorkerNode
    if config.task.role is Role.SERVER:
        node = ServerNode(config, _no_store, say, reporter)
    else:
        node = WorkerNode(config, say, reporter)
    try:
        node.start()
        outcome = _until_the_end(node, reporter)
        if isinstance(node, ServerNode):
            node.see_others_off()  # as a server of ``lockstep bench`` does
        return 0 if outcome.ok else 1
    finally:
        node.close()


def _until_the_end(node: Node, reporter: TaskReporter) -> Outcome:
    from lockstep.protocol.core.activity import TaskPhase
    from lockstep.runtime.task.outcome import JobEndedError
    from lockstep.runtime.task.worker_node import WorkerNode

    try:
        node.wait_until_member()
        os.write(1, b"formed\n")
        reporter.phase(TaskPhase.TRAINING)
        if isinstance(node, WorkerNode) and not os.environ.get("PLAIN_HOLD"):
            node.finish(0)
        return node.wait_until_ended()
    except JobEndedError as ended:
        if ended.outcome.ok:
            # The workers had nothing to do, and were done before this task learned that it is a member.
            os.write(1, b"formed\n")
        return ended.outcome


def _no_store() -> NoReturn:
    raise RuntimeError("a plain server stores nothing")


def _stop(_signum: int, _frame: FrameType | None) -> None:
    os._exit(143)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
