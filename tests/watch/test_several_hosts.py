"""Three hosts as network namespaces, a watcher and a torchrun on each: one speaks for all, and a cut link is named."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from helpers.waiting import wait_until
from lockstep.drill.systems import PROGRAM, events_in
from lockstep.protocol.core.causes import Cause, ReportKind
from lockstep.runtime.host_network import HostNetwork, ip, run_prefix, why_not
from lockstep.runtime.processes import descendants, send_signal
from watch.planting import SCRIPTS, Script, planted

PATIENCE = 240.0
HOSTS = {"a": "10.77.0.1", "b": "10.77.0.2", "c": "10.77.0.3"}


class Job:
    """One rank a host, each under a watcher of its own."""

    def __init__(self, network: HostNetwork, folder: Path, program: Sequence[str]) -> None:
        self.folders = {name: folder / name for name in HOSTS}
        self.processes: list[subprocess.Popen[bytes]] = []
        for place, name in enumerate(HOSTS):
            self.folders[name].mkdir()
            launcher = ["-m", "torch.distributed.run", "--nnodes=3", f"--node-rank={place}", "--nproc-per-node=1"]
            launcher += [f"--master-addr={HOSTS['a']}", "--master-port=29500"]
            watch = [sys.executable, "-m", "lockstep", "watch", f"--folder={self.folders[name] / 'run'}", "--"]
            command = [*watch, sys.executable, *launcher, *program]
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


@contextmanager
def three_hosts() -> Iterator[HostNetwork]:
    if missing := why_not():
        pytest.skip(missing)
    with HostNetwork({name: [f"{address}/24"] for name, address in HOSTS.items()}) as network:
        yield network


@pytest.mark.watch
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("script", "system"), [(SCRIPTS[0], "ddp"), (SCRIPTS[1], "fsdp")])
def test_a_cut_link_between_unchanged_programs(
    script: Script, system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    for name, value in planted(tmp_path / "planted", "cut", mark).items():
        monkeypatch.setenv(name, value)
    with three_hosts() as network, closing(Job(network, tmp_path, script.command(system))) as job:
        wait_for_file(mark, job)
        struck = time.time()
        ip("-n", network.namespaces["b"], "link", "set", network.interface("b"), "down")
        event = job.first_event(struck)
        sys.stderr.write(f"cut {script.name} {system}: {event['cause']} after {event['time'] - struck:.1f} s\n")
        assert (event["kind"], event["cause"]) == (ReportKind.VERDICT, Cause.LINK_DOWN), job.text()


@pytest.mark.watch
@pytest.mark.timeout(900)
def test_the_watcher_beside_rank_0_speaks_for_three_hosts(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    program = [str(PROGRAM), "--fault=stop", f"--mark={mark}", "--steps=100000", "--at=200"]
    with three_hosts() as network, closing(Job(network, tmp_path, program)) as job:
        struck = wait_for_file(mark, job)
        event = job.first_event(struck)
        sys.stderr.write(f"three hosts, stop: {event['cause']} after {event['time'] - struck:.1f} s\n")
        said = (event["kind"], event["cause"], event["culprit"])
        assert said == (ReportKind.VERDICT, Cause.FROZEN, "rank 1"), job.text()
        assert all(not events_in(job.folders[name]) for name in ("c",)), "another watcher has spoken as well"
