"""What a monitor shows at /metrics: from a live task, from one that is frozen, and to whom."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.cluster import in_process_cluster
from helpers.ports import free_port
from helpers.scraping import samples, scrape, value
from helpers.waiting import wait_until
from journal_cost import small_loop
from lockstep.drill.task import PlainStore
from lockstep.errors import BadInput
from lockstep.protocol.core.ids import ClusterShape, server, worker
from lockstep.runtime.monitor.exposition import MetricFamily, MetricKind, MetricPage
from lockstep.runtime.monitor.metrics_keeper import Ask, LifeSpan, MetricsKeeper, useful_seconds
from lockstep.runtime.monitor.metrics_server import MetricsServer, exporting
from lockstep.runtime.monitor.record import TaskRecord
from lockstep.runtime.monitor.reporter import TaskReport
from lockstep.runtime.processes import process_facts
from lockstep.runtime.startup.metrics_options import MetricsOptions, metrics_problems, metrics_token, number_on_host
from lockstep.runtime.task.node import Node
from lockstep.runtime.trace.step_tally import StepTally
from lockstep.runtime.watch.metrics import MOST_PEERS, metrics_json, metrics_of
from lockstep.security.chosen import chosen_key
from lockstep.transports.control.addresses import Address

TASK = str(worker(0))
ANSWER = b'{"step": 7, "started_at": 0, "counted": 3, "productive": 1.5, "incarnation": "aa", "last_step": 1000.0}'
STOPPED = "import os, signal\nwhile True: os.kill(os.getpid(), signal.SIGSTOP)"


def record_of(pid: int, report: TaskReport | None = None) -> TaskRecord:
    record = TaskRecord(TASK, "0.0.test", os.getpid())
    record.on_started(pid)
    record.on_report(report or TaskReport(task_address="127.0.0.1:1"))
    return record


def counting(asked: list[str]) -> Ask:
    """Answers like a task in step 7."""

    def ask(address: str, _: float) -> bytes:
        asked.append(address)
        return ANSWER

    return ask


@contextlib.contextmanager
def stopped_process() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", STOPPED]) as process:
        wait_until(lambda: (facts := process_facts(process.pid)) and facts.stopped, 15.0, "it is stopped")
        yield process.pid
        process.kill()


def test_a_task_is_asked_when_its_monitor_is_and_tells_what_its_steps_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_RUN_NAME", "night-7")
    with in_process_cluster(ClusterShape(1, 2), PlainStore) as cluster:

        def keeper_of(node: Node) -> MetricsKeeper:
            return MetricsKeeper(record_of(os.getpid(), node.reporter.report), "night-7")

        for node in cluster.nodes():
            keeper_of(node).look()  # they count from now on
        cluster.run(lambda node: small_loop(node, 50, lambda _: None))
        tallies = [node.sampler.tally for node in cluster.nodes()]
        wait_until(lambda: all(tally and tally.counted == 49 for tally in tallies), 15.0, "all steps are counted")
        of_server, of_worker = (keeper_of(node).text() for node in cluster.nodes()[:2])
    assert value(of_worker, "lockstep_task_answers", run="night-7", task=TASK) == 1
    assert value(of_worker, "lockstep_step_seconds_count") == 49
    assert value(of_worker, "lockstep_step_seconds_bucket", le="+Inf") == 49
    assert value(of_worker, "lockstep_step_part_seconds_count", part="computing") == 50
    waited = value(of_worker, "lockstep_waiting_seconds_total", peer=str(server(0)))
    assert waited == value(of_worker, "lockstep_step_part_seconds_sum", part="waiting")
    assert value(of_worker, "lockstep_links", path="grpc", state="up") == 1
    assert (value(of_worker, "lockstep_link_bytes_total", direction="sent") or 0) > 50 * 3 * 256
    assert value(of_server, "lockstep_step_part_seconds_count", part="collecting gradients") == 50
    assert value(of_server, "lockstep_links", state="up") == 2
    assert 0 < (value(of_server, "lockstep_goodput_ratio") or 0) <= 1


@pytest.mark.parametrize(("told", "shown"), [({}, None), ({"replica": None}, None), ({"replica": False}, 0)])
def test_only_servers_with_second_homes_say_whether_these_are_whole(told: dict[str, object], shown: int | None) -> None:
    said = json.dumps({**json.loads(ANSWER), **told}).encode()
    text = MetricsKeeper(record_of(os.getpid()), "", lambda _, __: said).text()
    assert value(text, "lockstep_second_homes_whole") == shown


def test_a_frozen_task_has_its_last_values_and_the_word_that_they_are_old() -> None:
    asked: list[str] = []
    record = record_of(os.getpid())
    keeper = MetricsKeeper(record, "", counting(asked))
    assert value(keeper.text(), "lockstep_task_answers") == 1
    with stopped_process() as pid:
        record.on_started(pid)
        keeper._asked_at = -10.0
        text = keeper.text()
        assert value(text, "lockstep_task_answers") == 0
        assert value(text, "lockstep_task_stopped") == 1
        assert value(text, "lockstep_task_up") == 1
    assert (value(text, "lockstep_step"), value(text, "lockstep_last_step_timestamp_seconds")) == (7, 1000)
    assert len(asked) == 1, "nobody asks a stopped process"
    assert value(text, "lockstep_incarnations_total") == 2
    record.on_exited(-9)
    text = keeper.text()
    assert (value(text, "lockstep_task_up"), value(text, "lockstep_task_exit_code")) == (0, -9)


def test_between_scrapes_the_task_is_not_asked() -> None:
    """Only at the beginning of each life, which counts from then on, after a report, and before the end."""
    asked: list[str] = []
    record = record_of(os.getpid())
    keeper = MetricsKeeper(record, "", counting(asked))
    assert [keeper.look() for _ in range(10)] == [True] + [False] * 9
    record.on_report(TaskReport(task_address="127.0.0.1:1", incarnation=5))
    assert [keeper.look(), keeper.look()] == [True, False]
    record.on_report(TaskReport(task_address="127.0.0.1:1", incarnation=5, phase="finishing"))
    assert [keeper.look(), keeper.look()] == [True, False]
    assert len(asked) == 3


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"step": "x"}', b'{"links": [1]}', b"[" * 1000])
def test_an_answer_that_makes_no_sense_is_none(answer: bytes) -> None:
    keeper = MetricsKeeper(record_of(os.getpid()), "", lambda _, __: answer)
    assert value(keeper.text(), "lockstep_task_answers") == 0


def test_however_many_ask_the_task_is_asked_once_a_second() -> None:
    asked: list[str] = []
    keeper = MetricsKeeper(record_of(os.getpid()), "", counting(asked))
    keeper._asked_at = float("inf")  # a moment ago, however slow this machine is
    keeper.text()
    assert asked == []


def test_a_report_is_fetched_before_its_task_is_gone() -> None:
    verdict = {"kind": "verdict", "cause": "dead", "culprit": str(server(0)), "peer": "", "holds": True}
    said = json.dumps({**json.loads(ANSWER), "verdict": verdict}).encode()
    record = record_of(os.getpid(), TaskReport(task_address="127.0.0.1:1"))
    keeper = MetricsKeeper(record, "", lambda _, __: said)
    keeper.look()
    record.on_report(TaskReport(task_address="127.0.0.1:1", printed=1))
    keeper.look()
    record.on_exited(3)
    assert value(keeper.text(), "lockstep_verdict_info", cause="dead", culprit=str(server(0))) == 1


def test_a_thousand_peers_are_a_few_series() -> None:
    with in_process_cluster(ClusterShape(1, 1), PlainStore) as cluster:
        cluster.run(lambda node: small_loop(node, 2, lambda _: None))
        (home,) = cluster.servers
        home.sampler.tally = tally = StepTally(home.task.role)
        tally._waited = {number: [worker(number), float(number)] for number in range(1000)}
        home.peers |= {worker(number): home.links._make_keeper(worker(0)) for number in range(1, 1000)}
        told = metrics_of(home)
        keeper = MetricsKeeper(record_of(os.getpid()), "", lambda _, __: metrics_json(home))
        text = keeper.text()
        for number in range(1, 1000):
            del home.peers[worker(number)]
    assert list(told["waited"])[:1] == [str(worker(999))]
    assert len(told["waited"]) == len(told["down"]) == MOST_PEERS
    assert value(text, "lockstep_links", state="none") == 999
    assert value(text, "lockstep_waiting_all_seconds_total") == pytest.approx(sum(range(1000)), abs=9.0)  # and steps
    assert len(samples(text)) < 150


def test_labels_are_plain_and_escaped() -> None:
    page = MetricPage({"run": "", "task": 'a"b\\c\nd'})
    page.add(MetricFamily("lockstep_x", MetricKind.GAUGE, "X."), 1.5, long="l" * 999)
    (line,) = page.text().splitlines()[2:]
    assert line == f'lockstep_x{{task="a\\"b\\\\c d",long="{"l" * 200}"}} 1.5'


@pytest.mark.parametrize(
    ("lives", "seconds"),
    [
        ([], 0.0),
        ([LifeSpan(0, 10, 10, 20.0)], 20.0),
        ([LifeSpan(0, 10, 10, 20.0), LifeSpan(6, 10, 4, 8.0)], 12.0 + 8.0),
        ([LifeSpan(0, 10, 10, 20.0), LifeSpan(8, 12, 4, 4.0), LifeSpan(4, 5, 1, 1.0)], 8.0 + 0.0 + 1.0),
        ([LifeSpan(0, 0, 0, 0.0)], 0.0),
    ],
)
def test_steps_that_are_made_again_count_once(lives: list[LifeSpan], seconds: float) -> None:
    assert useful_seconds(lives) == pytest.approx(seconds)


# -- where and to whom --


@contextlib.contextmanager
def serving(host: str) -> Iterator[int]:
    port = free_port()
    server = MetricsServer(Address(host, port), lambda: "lockstep_x 1\n")
    try:
        yield port
    finally:
        server.close()


def test_on_the_loopback_address_everybody_may_read() -> None:
    with serving("127.0.0.1") as port:
        assert scrape(port) == "lockstep_x 1\n"
        with pytest.raises(urllib.error.HTTPError, match="404"), contextlib.closing(_get(port, "/")):
            pass


def _get(port: int, path: str) -> Any:
    return urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10.0)


@pytest.mark.parametrize("sent", ["", "wrong", "\u00e9"])
def test_where_other_hosts_connect_a_caller_needs_the_token(sent: str) -> None:
    key = chosen_key()
    assert key is not None
    with serving("0.0.0.0") as port:
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            scrape(port, sent)
        refused.value.close()
        assert scrape(port, metrics_token(key)) == "lockstep_x 1\n"


def test_silent_callers_keep_nobody_out() -> None:
    with serving("127.0.0.1") as port, contextlib.ExitStack() as silent:
        for _ in range(40):
            silent.enter_context(socket.create_connection(("127.0.0.1", port), 10.0))
        assert scrape(port) == "lockstep_x 1\n"


def test_a_port_that_is_taken_is_said_with_its_owner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BadInput, match=rf"at 127.0.0.1:{port}: the port is taken by process {os.getpid()}"):
            MetricsServer(Address("127.0.0.1", port), str)


def test_a_file_is_written_for_each_task_and_says_how_it_ended(tmp_path: Path) -> None:
    record = record_of(os.getpid(), TaskReport())
    with exporting(MetricsOptions(file=str(tmp_path / "lockstep.prom")), record, ((TASK, "127.0.0.1:1"),)):
        written = tmp_path / "lockstep-worker-0.prom"
        wait_until(written.exists, 15.0, "it is written")
        assert value(written.read_text(), "lockstep_task_up") == 1
        record.on_exited(1)
    assert value(written.read_text(), "lockstep_task_exit_code") == 1
    assert list(tmp_path.iterdir()) == [written]


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    (folder / "lockstep-worker-0.prom").mkdir()  # in its place
    with exporting(MetricsOptions(file=str(folder / "lockstep.prom")), record_of(os.getpid(), TaskReport()), ()):
        wait_until(lambda: "--metrics_file: cannot write" in capsys.readouterr().err, 15.0, "it is said")


def test_tasks_of_one_host_take_ports_in_a_row() -> None:
    cluster = ((str(server(0)), "A:1"), (str(worker(0)), "b:1"), (str(worker(1)), "a:2"), (TASK + "9", "a:3"))
    options = MetricsOptions("0.0.0.0:9400")
    assert [number_on_host(task, cluster) for task, _ in cluster] == [0, 0, 1, 2]
    assert options.address(2) == Address("0.0.0.0", 9402)
    assert MetricsOptions("9400").address() == Address("127.0.0.1", 9400)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (MetricsOptions("0"), "--metrics_port=0 is not a port from 1 to 65535; give PORT, or HOST:PORT"),
        (MetricsOptions("99999"), "is not a port"),
        (MetricsOptions("here"), "is not a port"),
        (MetricsOptions(file="/"), "is not the name of a file; give one like FOLDER/lockstep.prom"),
        (MetricsOptions(file="/no/such/folder/x.prom"), "there is no folder /no/such/folder; make it first"),
    ],
)
def test_what_is_wrong_is_said_with_a_remedy(options: MetricsOptions, said: str) -> None:
    (sentence,) = metrics_problems(options)
    assert said in sentence
