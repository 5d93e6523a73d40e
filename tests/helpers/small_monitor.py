"""A monitor for tests, run as a program: TASK PORT LINGER STOP COMMAND... ``SMALL_RESTARTS``: how often again."""

from __future__ import annotations

import os
import sys

from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.monitor.monitor import MonitorSpec, run_monitor


def main(arguments: list[str]) -> int:
    task, port, linger, stop, *command = arguments
    spec = MonitorSpec(
        task=TaskId.parse(task),
        host="127.0.0.1",
        port=int(port),
        command=tuple(command),
        version="0.0.test",
        linger_seconds=float(linger),
        stop_seconds=float(stop),
        restarts=int(os.environ.get("SMALL_RESTARTS", "0")),
    )
    return run_monitor(spec)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
