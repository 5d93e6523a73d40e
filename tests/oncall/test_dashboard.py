"""The dashboard in a real browser: it follows a job, shows a fault, and scrolls with a thousand tasks.

Needs Chromium (Debian: ``apt-get install chromium``). The page is that of the real command, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers.programs import Program, start_lockstep
from helpers.waiting import wait_until
from lockstep.drill.cluster import DrillCluster
from lockstep.protocol.core.ids import ClusterShape, worker
from lockstep.runtime.processes import become_subreaper
from tools.browser import Tab, browser, find_browser

pytestmark = [
    pytest.mark.oncall,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_browser() is None, reason="no Chromium is installed; on Debian: apt-get install chromium"),
]

SHOWN_SECONDS = 5.0
"""How long after its verdict a fault may take to be on the page."""
FRAMES_A_SECOND = 10.0
TITLE = "document.getElementById('verdict-title').textContent"
STEP = "Number(document.querySelector('.number .value').textContent)"
RUNS_OFF = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
SCROLLS = """
new Promise((done) => {
  const times = [], boxes = ['html', '.hosts', '#timeline-box'].map((one) => document.querySelector(one));
  const step = (now) => {
    times.push(now);
    boxes.forEach((box) => { box.scrollTop = (Math.sin(now / 400) + 1) / 2 * (box.scrollHeight - box.clientHeight); });
    if (now - times[0] < 4000) requestAnimationFrame(step);
    else done({frames: times.length - 1, seconds: (now - times[0]) / 1000});
  };
  requestAnimationFrame(step);
})
"""


@pytest.fixture
def new_tab() -> Iterator[Callable[[], Tab]]:
    become_subreaper()
    with browser() as tabs:
        yield tabs


def link_of(program: Program) -> str:
    """The link that the command prints."""
    found = re.search(r"Open (http://127\.0\.0\.1:\d+/open/\S+)", program.wait_for("Each link works once", 60))
    assert found is not None
    return found[1]


def opened(tab: Tab, program: Program) -> str:
    link = link_of(program)
    tab.resize(1280, 900)
    tab.open(link)
    tab.wait_for("document.documentElement.dataset.frames > 0", 60)
    return link


def fits_everywhere(tab: Tab) -> None:
    """Nothing runs off the page, on a screen or on a phone."""
    for width, phone in ((1280, False), (390, True)):
        tab.resize(width, 844, phone=phone)
        assert tab.wait_for(f"!({RUNS_OFF})", 5), f"at {width} pixels"
    tab.resize(1280, 900)


def verdict_time(folder: Path) -> float:
    """When the job came to its verdict; 0 before."""
    events = folder / "events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    return next((one["time"] for one in map(json.loads, lines) if one["kind"] == "verdict"), 0.0)


def test_the_page_follows_a_cluster_and_shows_a_planted_fault_and_its_folder_afterwards(
    tmp_path: Path, new_tab: Callable[[], Tab]
) -> None:
    shape = ClusterShape(1, 3)
    with DrillCluster(shape, tmp_path) as cluster:
        for task in shape.tasks():
            cluster.start(cluster.plan(task, steps=1_000_000, on_stall="report"))
        cluster.wait_until_it_listens(worker(0), 60)
        with start_lockstep("dashboard", cluster.address(worker(0))) as program:
            tab = new_tab()
            link = opened(tab, program)
            before = tab.wait_for(f"{STEP} > 5 && {STEP}", 90)
            assert tab.wait_for(f"{STEP} > {before}", 30), "it follows the job"
            assert tab.evaluate("document.querySelectorAll('.task').length") == 4
            assert tab.evaluate("location.pathname") == "/", "the link does not stay in the address bar"
            tab.wait_for("document.getElementById('verdict').dataset.mood == 'healthy'", 30)
            fits_everywhere(tab)

            os.kill(cluster.task_pid(worker(1)), signal.SIGSTOP)
            tab.wait_for(f"{TITLE} == 'Worker 1: frozen'", 60)
            shown = time.time()
            decided = wait_until(lambda: verdict_time(tmp_path), 60, "the job's own verdict")
            print(f"shown {shown - decided:.2f} s after the verdict")  # noqa: T201
            assert shown - decided < SHOWN_SECONDS
            assert "kill -CONT" in tab.evaluate("document.querySelector('.command code').textContent")
            assert tab.evaluate("document.querySelector('.node.culprit').textContent") == "✕ worker 1"
            assert tab.wait_for("document.querySelectorAll('.task.culprit').length", 10) == 1
            fits_everywhere(tab)
            assert tab.complaints() == []

            tab.open(link)
            assert tab.wait_for("document.body.textContent.includes('This link has been used')", 10)
        wait_until(lambda: list(tmp_path.glob("worker-0.snapshot.json")), 30, "the files of the run")

    with start_lockstep("dashboard", str(tmp_path)) as program:
        tab = new_tab()
        opened(tab, program)
        assert tab.evaluate(TITLE) == "Worker 1: frozen"
        assert tab.evaluate("document.getElementById('live').dataset.state") == "still"
        fits_everywhere(tab)
        assert tab.complaints() == []


def test_a_thousand_simulated_tasks_scroll_at_ten_frames_a_second(new_tab: Callable[[], Tab]) -> None:
    with start_lockstep("dashboard", "--simulate=1000") as program:
        tab = new_tab()
        opened(tab, program)
        tab.wait_for(f"{STEP} > 1", 200)
        assert tab.evaluate("document.querySelectorAll('.task').length") == 1000
        found = tab.evaluate(SCROLLS)
        rate = found["frames"] / found["seconds"]
        print(f"{rate:.1f} frames a second")  # noqa: T201
        assert rate >= FRAMES_A_SECOND
        fits_everywhere(tab)
        assert tab.complaints() == []
