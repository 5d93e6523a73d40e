"""Runs what the tests ask for on a lab host: one JSON file for each command, in a folder that both sides see."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from pathlib import Path

SHARE = Path("/share")
POLL_SECONDS = 0.1


def finish(name: str, process: subprocess.Popen[bytes], log: int) -> None:
    code = process.wait()
    os.close(log)
    words = SHARE / "done" / f"{name}.part"
    words.write_text(str(code))
    words.rename(SHARE / "done" / name)


def begin(order: Path) -> None:
    command = json.loads(order.read_text())["command"]
    order.unlink()
    log = os.open(SHARE / "out" / order.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    process = subprocess.Popen(
        ["/bin/bash", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    (SHARE / "pid" / order.name).write_text(str(process.pid))
    threading.Thread(target=finish, args=(order.name, process, log), daemon=True).start()


def main() -> None:
    for folder in ("out", "pid", "done"):
        (SHARE / folder).mkdir(exist_ok=True)
    (SHARE / "ready").write_text("")
    while not (SHARE / "stop").exists():
        for order in sorted((SHARE / "todo").iterdir()):
            if order.suffix != ".part":
                begin(order)
        time.sleep(POLL_SECONDS)
    Path("/proc/sysrq-trigger").write_text("o")


if __name__ == "__main__":
    main()
