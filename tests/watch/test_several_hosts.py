"""Three hosts as network namespaces, a watcher and a torchrun on each: one speaks for all, and a cut link is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import wait_until
from lockstep.drill.systems import PROGRAM, events_in
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.runtime.host_network import HostNetwork, ip, run_prefix, why_not
from lockstep.runtime.processes import descendants, send_signal

PATIENCE = 240.0
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}


class Job:
    """One rank a host, each under a watcher of its own."""

    def __init__(self, network: HostNetwork, folder: Path, *arguments: str) -> None:
        self.folders = {name: folder / name for name in HOSTS}
        self.processes: list[subprocess.Popen[bytes]] = []
        for place, name in enumerate(HOSTS):
            self.folders[name].mkdir()
            launcher = ["-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={place}", "--nproc-per-node=1"]
            launcher += [f"--master-addr={HOSTS['a']}", "--master-port=29500"]
            watch = [sys.executable, "-m", "lockstep", "watch", f"--folder={self.folders[name] / 'run'}", "--"]
            command = [*watch, sys.executable, *launcher, str(PROGRAM), *arguments]
            variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": network.interface(name)}
            with open(self.folders[name] / "output.txt", "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        [*run_prefix(network.namespaces[name]), *command],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=variables,
                    )
                )

    def text(self) -> str:
        return "\n".join((folder / "output.txt").read_text(errors="replace") for folder in self.folders.values())

    def first_event(self, after: float) -> dict[str, Any]:
        """Of the watcher beside rank 0."""
        found = self.wait(lambda: [event for event in events_in(self.folders["a"]) if event["time"] >= after])
        first: dict[str, Any] = found[0]
        return first

    def wait(self, condition: Callable[[], Any]) -> Any:
        """Fails with what the watchers have said."""
        try:
            return wait_until(condition, PATIENCE, "the job has come so far")
        except AssertionError as late:
            raise AssertionError(self.text()) from late

    def close(self) -> None:
        for process in self.processes:
            below = descendants(process.pid)
            process.terminate()
            for facts in below:
                send_signal(facts.pid, 9)
        for process in self.processes:
            process.wait(PATIENCE)


def wait_for_file(path: Path, job: Job) -> float:
    job.wait(path.exists)
    return float(path.read_text())


@pytest.mark.watch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["cut", "stop"])
def test_the_watcher_beside_rank_0_speaks_for_three_hosts(fault: str, tmp_path: Path) -> None:
    if missing := why_not():
        pytest.skip(missing)
    with ExitStack() as stack:
        network = stack.enter_context(HostNetwork({name: [f"{address}/24"] for name, address in HOSTS.items()}))
        mark = tmp_path / "mark"
        job = Job(network, tmp_path, f"--fault={fault}", f"--mark={mark}", "--steps=100000", "--at=200")
        stack.callback(job.close)
        struck = wait_for_file(mark, job)
        if fault == "cut":
            struck = time.time()
            ip("-n", network.namespaces["b"], "link", "set", network.interface("b"), "down")
        event = job.first_event(struck)
        sys.stderr.write(f"three hosts, {fault}: {event['cause']} after {event['time'] - struck:.1f} s\n")
        assert event["kind"] == ReportKind.VERDICT, job.text()
        assert event["cause"] == (Cause.LINK_DOWN if fault == "cut" else Cause.FROZEN), job.text()
        if fault == "stop":
            assert event["culprit"] == "rank 1", job.text()
        assert all(not events_in(job.folders[name]) for name in ("c",)), "another watcher has spoken as well"
