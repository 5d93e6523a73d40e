"""Drives a Chromium that is installed here, by its DevTools protocol over a pipe: for tests and screenshots.

No library and no port: the browser reads commands from one descriptor and writes its answers to another.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS: Final = (
    *("--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--mute-audio"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
    *(
        "--disable-component-update",
        "--disable-breakpad",
        "--disable-crash-reporter",
        "--disable-sync",
        "--hide-scrollbars",
        "--no-proxy-server",
    ),
)
# It must get the ends of the pipes as descriptors 3 and 4; what it starts as, takes care of that.
_START: Final = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
COMMAND_SECONDS: Final = 30.0


def find_browser() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class BrowserError(Exception):
    """The browser did not do what it was told; the text says what."""


class Tab:
    """One page of a browser."""

    def __init__(self, browser: _Pipe, session: str) -> None:
        self._browser = browser
        self._session = session
        self.call("Page.enable")
        self.call("Runtime.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def open(self, url: str) -> None:
        found = self.call("Page.navigate", url=url)
        if found.get("errorText"):
            raise BrowserError(f"{url}: {found['errorText']}")

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(str(found["exceptionDetails"].get("exception", {}).get("description", found)))
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20.0) -> Any:
        """Until the expression is true; returns its value. While a page loads, it may fail."""
        deadline = time.monotonic() + seconds
        problem = ""
        while time.monotonic() < deadline:
            try:
                value = self.evaluate(script)
            except BrowserError as error:
                problem = f" ({error})"
            else:
                if value:
                    return value
            time.sleep(0.05)
        raise BrowserError(f"not true within {seconds:g} s: {script}{problem}")

    def resize(self, width: int, height: int, scale: float = 1.0, *, phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, height: int = 0) -> None:
        """The page from its top; all of it, or its first ``height`` pixels."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(height or size["height"], size["height"])}
        found = self.call("Page.captureScreenshot", format="png", clip={**clip, "scale": 1}, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def complaints(self) -> list[str]:
        """What this tab's console says is wrong, and what the page's policy has kept from happening."""
        own = [one for one in self._browser.events if one.get("sessionId") == self._session]
        return [_words(one) for one in own if one.get("method") in _COMPLAINTS and _is_bad(one)]


_COMPLAINTS: Final = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


def _is_bad(event: dict[str, Any]) -> bool:
    params = event["params"]
    return "exceptionDetails" in params or "error" in (params.get("type"), params.get("entry", {}).get("level"))


def _words(event: dict[str, Any]) -> str:
    return json.dumps(event["params"])[:500]


@contextmanager
def browser(flags: Sequence[str] = ()) -> Iterator[Callable[[], Tab]]:
    """A running browser; what it yields opens a new tab. Nothing of it is left afterwards."""
    path = find_browser()
    if path is None:
        raise BrowserError("no Chromium is installed; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        more = ["--no-sandbox"] if os.geteuid() == 0 else []
        pipe = _Pipe([path, *FLAGS, *more, f"--user-data-dir={profile}", *flags, "about:blank"])
        try:
            yield lambda: _new_tab(pipe)
        finally:
            pipe.close()


def _new_tab(pipe: _Pipe) -> Tab:
    target = pipe.call("Target.createTarget", {"url": "about:blank"})["targetId"]
    session = pipe.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
    tab = Tab(pipe, session)
    tab.call("Log.enable")
    return tab


class _Pipe:
    """Commands out, answers and events in, each ended by a zero byte."""

    def __init__(self, command: Sequence[str]) -> None:
        commands_in, self._out = os.pipe()
        self._in, answers_out = os.pipe()
        start = [sys.executable, "-c", _START, str(commands_in), str(answers_out), *command]
        self._process = subprocess.Popen(
            start, pass_fds=(commands_in, answers_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands_in)
        os.close(answers_out)
        self._number = 0
        self._left = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, params: dict[str, Any], session: str = "") -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + COMMAND_SECONDS
        while True:
            answer = self._read(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error'].get('message')}")
                return dict(answer["result"])
            self.events = [*self.events, answer][-500:]

    def _read(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BrowserError(f"no answer to {method} within {COMMAND_SECONDS:g} s")
            data = os.read(self._in, 1 << 20)
            if not data:
                raise BrowserError("the browser has ended")
            self._left += data
        one, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(one))

    def close(self) -> None:
        os.close(self._out)  # it ends when nobody can tell it anything any more
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
