"""The pictures of the dashboard in docs/images: ``make screenshots``.

Each shows the page of the real command. A small real job (``lockstep bench``) has one worker stopped while it trains; a
simulated one shows what a thousand tasks look like.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from PIL import Image

from lockstep.diagnose.asking import cluster_at
from lockstep.diagnose.collect import collect
from lockstep.protocol.core.ids import worker
from lockstep.security.chosen import settle
from lockstep.terminal import say
from tools.browser import Tab, browser

IMAGES: Final = Path(__file__).parents[1] / "docs" / "images"
LOCKSTEP: Final = (sys.executable, "-m", "lockstep")
WIDTH: Final = 1280
COLOURS: Final = 256
"""Of a picture: a page has few, and the file becomes a quarter of its size."""
TITLE: Final = "document.getElementById('verdict-title').textContent"
STEP: Final = "Number(document.querySelector('.number .value').textContent)"
MODEL: Final = ("--model=lenet", "--data_name=digits", "--batch_size=16", "--device=cpu", "--display_every=1")
WAIT: Final = 300.0


def main() -> int:
    settle(say)
    IMAGES.mkdir(exist_ok=True)
    with browser() as new_tab:
        _of_a_real_job(new_tab)
        _of_a_thousand_tasks(new_tab)
    for path in sorted(IMAGES.glob("*.png")):
        _shrink(path)
        print(f"{path.relative_to(IMAGES.parents[1])}: {path.stat().st_size // 1024} kB")
    return 0


def _of_a_real_job(new_tab: Callable[[], Tab]) -> None:
    job = ["bench", "--ps=1", "--workers=3", "--num_batches=1000000", "--on_stall=report", *MODEL]
    with _running([*LOCKSTEP, *job]) as output:
        address = _found(output, r"lockstep why (\S+:\d+)")
        _found(output, "Running (warm up)")
        with _running([*LOCKSTEP, "dashboard", address]) as shown:
            tab = new_tab()
            _open(tab, _found(shown, r"Open (http\S+)"))
            tab.wait_for(f"{STEP} > 40 && document.getElementById('verdict').dataset.mood == 'healthy'", WAIT)
            tab.wait_for("document.querySelectorAll('#loss-chart .curve').length && new Promise("
                         "(done) => setTimeout(() => done(true), 15000))", WAIT)  # fmt: skip
            _shoot(tab, "dashboard-healthy")
            os.kill(_process_of(str(worker(1)), address), signal.SIGSTOP)
            tab.wait_for(f"{TITLE} == 'Worker 1: frozen' && !!document.querySelector('[data-name=stack]')", WAIT)
            _shoot(tab, "dashboard")
            tab.prefer("dark")
            _shoot(tab, "dashboard-dark")
            tab.prefer("light")
            tab.resize(390, 844, 2, phone=True)
            _shoot(tab, "dashboard-phone", 1500)


def _process_of(task: str, address: str) -> int:
    """Asked until it answers: the machine is busy with all of this."""
    while True:
        seen = collect(cluster_at(address), 5.0).get(task)
        if seen is not None and seen.view is not None:
            return seen.view.pid


def _of_a_thousand_tasks(new_tab: Callable[[], Tab]) -> None:
    fault = (
        '{"fault": "Stick", "task": "/job:worker/replica:0/task:619", "place": "user code", "step": 3, "seconds": 1000}'
    )
    with _running([*LOCKSTEP, "dashboard", "--simulate=1000", f"--fault={fault}"]) as shown:
        tab = new_tab()
        _open(tab, _found(shown, r"Open (http\S+)"))
        tab.wait_for(f"{TITLE}.startsWith('Worker 619:')", WAIT)
        _shoot(tab, "dashboard-1000")


def _open(tab: Tab, link: str) -> None:
    tab.prefer("light")
    tab.resize(WIDTH, 900)
    tab.open(link)
    tab.wait_for("document.documentElement.dataset.frames > 0", WAIT)


def _shoot(tab: Tab, name: str, height: int = 0) -> None:
    """Once the newest frame is drawn, and what came into sight with it."""
    tab.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(() => done(true)), 1000))")
    tab.screenshot(IMAGES / f"{name}.png", height)


def _shrink(path: Path) -> None:
    whole = Image.open(path).convert("RGB")
    # Rare colours count as much as frequent ones: a small green dot stays green.
    picture = whole.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)


@contextmanager
def _running(command: Sequence[str]) -> Iterator[Path]:
    """A program, and the file that has its output; it is ended afterwards, with all that it started."""
    output = Path(os.environ.get("TMPDIR", "/tmp"), f"screenshots-{os.getpid()}-{command[3]}.log")
    with output.open("wb") as log:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield output
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.unlink()


def _found(output: Path, pattern: str) -> str:
    """What a program has printed, once it has."""
    deadline = time.monotonic() + WAIT
    while time.monotonic() < deadline:
        found = re.search(pattern, output.read_text(errors="replace"))
        if found is not None:
            return found[1]
        time.sleep(0.1)
    raise TimeoutError(f"{pattern!r} was never printed: {output.read_text(errors='replace')}")


if __name__ == "__main__":
    sys.exit(main())
