"""Who is called when a report is printed: a real command, a real webhook."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from helpers.waiting import wait_until
from lockstep.protocol.core.ids import worker
from lockstep.runtime.processes import process_facts
from lockstep.runtime.startup.pages import Pages
from lockstep.runtime.watch import pager
from lockstep.runtime.watch.pager import MOST_WAITING, Pager
from runtime.watch.test_watchdog import QUICK, train_through_a_stall


def command(program: str) -> str:
    return shlex.join([sys.executable, "-c", program])


def appends_to(path: Path) -> str:
    return command(f"import sys; open({str(path)!r}, 'a').write(sys.stdin.read() + '\\n')")


@contextmanager
def webhook(answer: int = 200) -> Iterator[tuple[str, list[bytes]]]:
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(answer)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.timed
def test_a_report_calls_a_command_and_a_webhook_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    with webhook() as (url, got):
        train_through_a_stall(tmp_path, dataclasses.replace(QUICK, pages=Pages(appends_to(calls), url)))
    (line,), (body,) = calls.read_text().splitlines(), got
    event = json.loads(line)
    assert event == json.loads(body)
    assert (event["schema"], event["kind"], event["culprit"]) == (1, "stall", str(worker(1)))
    assert event["remedy"]
    assert not event["job_ends"]
    assert Path(event["report"]).read_text()


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no signal on the pager')", "exit code 1: no signal on the pager"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "exit code -15"),
    ],
)
def test_a_command_that_fails_is_said_once(program: str, said: str) -> None:
    sentences: list[str] = []
    one = Pager(Pages(command(program)), sentences.append)
    one.send({})
    one.send({})
    one.close()
    assert sentences == [f"--on_verdict could not tell anybody of the verdict: {said}"]


def test_a_command_that_does_not_end_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pager, "PAGE_SECONDS", 0.5)
    sentences: list[str] = []
    one = Pager(Pages(f"sh -c 'sleep 100 & echo $! > {tmp_path}/pid; wait'"), sentences.append)
    one.send({})
    wait_until(lambda: sentences, 10.0, "the command is killed")
    assert sentences == [
        "--on_verdict could not tell anybody of the verdict: it did not end within 0.5 s, and was killed"
    ]
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: (facts := process_facts(pid)) is None or facts.dead, 10.0, "what it started is gone")
    one.close()


@pytest.mark.parametrize("answer", [302, 500])
def test_a_webhook_that_refuses_or_leads_elsewhere_is_said(answer: int) -> None:
    sentences: list[str] = []
    with webhook(answer) as (url, got):
        one = Pager(Pages(webhook=url), sentences.append)
        one.send({"kind": "verdict"})
        one.close()
    assert len(got) == 1
    assert sentences == [f"--verdict_webhook could not tell anybody of the verdict: the answer was {answer}"]


def test_nobody_waits_for_a_slow_command_and_what_is_too_much_is_dropped(tmp_path: Path) -> None:
    sentences: list[str] = []
    gate = tmp_path / "gate"
    one = Pager(
        Pages(command(f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)")), sentences.append
    )
    for _ in range(MOST_WAITING + 2):
        one.send({})
    assert sentences == [
        "a verdict was not sent on: those before it are still waiting for --on_verdict or --verdict_webhook"
    ]
    gate.touch()
    wait_until(one.idle, 30.0, "all are sent")
    one.close()


def test_without_anybody_to_call_there_is_no_thread() -> None:
    before = threading.active_count()
    one = Pager(Pages(), lambda _: None)
    one.send({})
    assert threading.active_count() == before
    one.close()
