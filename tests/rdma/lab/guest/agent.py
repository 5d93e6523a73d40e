"""Runs what the tests ask for on a lab host, and tells what becomes of it: lines of JSON on a virtual serial port.

Whatever it says has the time of this host's own clock: what happens here is timed here.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

PORTS = Path("/sys/class/virtio-ports")
NAME = "lab"
CGROUPS = Path("/lab/cgroup")
IN_ITS_GROUP = 'echo $$ >"$0" && eval "$1"'
"""Whatever a command starts stays in its control group, and can be ended with it."""
DRAIN_SECONDS = 2.0
"""How long the end of a command waits for its last words: others may have its output open, too."""


class Channel:
    """The serial port that leads to the tests."""

    def __init__(self) -> None:
        name = next(port.name for port in PORTS.iterdir() if (port / "name").read_text().strip() == NAME)
        self._port = os.open(f"/dev/{name}", os.O_RDWR)
        self._lock = threading.Lock()

    def say(self, **words: object) -> None:
        line = json.dumps({**words, "at": time.monotonic()}).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._port, line) :]

    def orders(self) -> Iterator[dict[str, str]]:
        with os.fdopen(os.dup(self._port), "rb", buffering=0) as lines:
            for line in lines:
                yield json.loads(line)


def pump(channel: Channel, name: str, output: int) -> None:
    """Hand on what a command writes."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := os.read(output, 1 << 15):
        channel.say(job=name, text=decoder.decode(chunk))
    os.close(output)


def run(channel: Channel, name: str, command: str) -> None:
    reading, writing = os.pipe()
    group = CGROUPS / name
    group.mkdir()
    channel.say(job=name, began=True)
    process = subprocess.Popen(
        ["/bin/bash", "-c", IN_ITS_GROUP, str(group / "cgroup.procs"), command],
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    os.close(writing)
    channel.say(job=name, pid=process.pid)
    words = threading.Thread(target=pump, args=(channel, name, reading), daemon=True)
    words.start()
    code = process.wait()
    ended = time.monotonic()
    words.join(DRAIN_SECONDS)
    channel.say(job=name, code=code, ended=ended)


def end(name: str, pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    (CGROUPS / name / "cgroup.kill").write_text("1")


def main() -> None:
    channel = Channel()
    channel.say(ready=True)
    for order in channel.orders():
        if "off" in order:
            break
        if "end" in order:
            end(order["end"], int(order["pid"]))
            continue
        threading.Thread(target=run, args=(channel, order["job"], order["command"]), daemon=True).start()
    Path("/proc/sysrq-trigger").write_text("o")


if __name__ == "__main__":
    main()
