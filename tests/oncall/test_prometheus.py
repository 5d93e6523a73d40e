"""A real Prometheus and a real Alertmanager follow a real job, of which one task is frozen."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.ports import free_ports, free_range
from helpers.programs import LOCKSTEP, Program
from helpers.scraping import scrape, value
from helpers.waiting import wait_until
from lockstep.cli.metrics import FILES, shipped
from lockstep.protocol.core.ids import server, worker
from lockstep.runtime.startup.run_name import VARIABLE
from lockstep.transports.control.monitor_client import Unreachable, describe

pytestmark = [pytest.mark.oncall, pytest.mark.timeout(300)]

RUN = "night-7"
TASKS = (server(0), worker(0), worker(1))
FROZEN = worker(1)
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ['127.0.0.1:{alerts}']}}]}}]}}
scrape_configs: [{{job_name: training, static_configs: [{{targets: {targets}}}]}}]
"""
ALERTING = """
route: {{receiver: test, group_by: ['...'], group_wait: 0s, group_interval: 1s, repeat_interval: 1h}}
receivers: [{{name: test, webhook_configs: [{{url: '{url}', send_resolved: false}}]}}]
"""


def tool(name: str) -> str:
    """Debian's packages prometheus and prometheus-alertmanager have them."""
    found = shutil.which(name)
    assert found is not None, f"{name} is missing; install Debian's packages prometheus and prometheus-alertmanager"
    return found


@contextlib.contextmanager
def pager() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Who is called by the Alertmanager, and what it was told."""
    alerts: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            alerts.extend(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}/", alerts
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


@contextlib.contextmanager
def watched_by_prometheus(folder: Path, ports: list[int], url: str) -> Iterator[int]:
    """Both programs; yields the port of Prometheus."""
    queries, alerts, gossip = free_ports(3)
    rules, config, alerting = folder / FILES["rules"], folder / "prometheus.yml", folder / "alertmanager.yml"
    rules.write_text(shipped(FILES["rules"]))
    targets = [f"127.0.0.1:{port}" for port in ports]
    config.write_text(CONFIG.format(rules=rules, alerts=alerts, targets=targets))
    alerting.write_text(ALERTING.format(url=url))
    subprocess.run([tool("promtool"), "check", "config", str(config)], check=True, capture_output=True, timeout=60)
    manager = [
        tool("prometheus-alertmanager"),
        f"--config.file={alerting}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address=127.0.0.1:{alerts}",
        f"--cluster.listen-address=127.0.0.1:{gossip}",
    ]
    prometheus = [
        tool("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{queries}",
    ]
    with Program(manager), Program(prometheus):
        yield queries


def asked(port: int, query: str) -> dict[str, float]:
    """What Prometheus answers now, by task."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10.0) as answer:
            found = json.loads(answer.read())["data"]["result"]
    except OSError:
        return {}
    return {one["metric"].get("task", ""): float(one["value"][1]) for one in found}


def pid_of(address: str) -> int:
    try:
        return describe(address, 2.0).pid
    except Unreachable:
        return 0


def test_an_alert_fires_while_a_task_is_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, RUN)
    addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
    first, last = free_range(3)  # as the three tasks of one host take them
    ports = list(range(first, last + 1))
    flags = [
        *(f"--ps_hosts={addresses[0]}", f"--worker_hosts={addresses[1]},{addresses[2]}", "--device=cpu"),
        *("--model=trivial", "--batch_size=4", "--num_batches=1000000", "--num_threads=1", "--on_stall=report"),
        f"--metrics_port={first}",
    ]
    with contextlib.ExitStack() as stack:
        url, alerts = stack.enter_context(pager())
        for task in TASKS:
            role = ["--job_name=ps" if task == TASKS[0] else "--job_name=worker", f"--task_index={task.index}"]
            stack.enter_context(Program([*LOCKSTEP, "bench", *role, *flags]))
        queries = stack.enter_context(watched_by_prometheus(tmp_path, ports, url))
        everybody = {str(task): 1.0 for task in TASKS}
        wait_until(lambda: asked(queries, f'lockstep_task_answers{{run="{RUN}"}}') == everybody, 120.0, "all answer")
        wait_until(lambda: len(asked(queries, "rate(lockstep_examples_total[10s]) > 0")) == 2, 60.0, "workers train")
        subprocess.run([tool("promtool"), "check", "metrics"], input=scrape(ports[2]).encode(), check=True, timeout=60)
        assert not alerts
        frozen = pid_of(addresses[2])
        os.kill(frozen, signal.SIGSTOP)
        try:
            wait_until(lambda: asked(queries, "lockstep_task_stopped == 1") == {str(FROZEN): 1.0}, 30.0, "it is seen")
            assert value(scrape(ports[2]), "lockstep_step") is not None, "the last values stay"
            wait_until(lambda: fired(alerts, "LockstepTaskFrozen", task=str(FROZEN), run=RUN), 120.0, "the alert fires")
            wait_until(lambda: fired(alerts, "LockstepVerdict", culprit=str(FROZEN)), 60.0, "so does the verdict's")
        finally:
            os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: asked(queries, "lockstep_task_answers") == everybody, 60.0, "all answer again")
        wait_until(lambda: not asked(queries, "lockstep_verdict_info == 1"), 60.0, "the verdict holds no longer")


def fired(alerts: list[dict[str, Any]], name: str, **labels: str) -> bool:
    wanted = {"alertname": name, **labels}
    return any(one["status"] == "firing" and wanted.items() <= one["labels"].items() for one in list(alerts))
