"""Carries a verdict out of the cluster: to a command of the user's, or to a webhook.

Both get the same JSON object (``events.py``), and neither is in the way of training: they run on a thread of their own,
with a deadline, and what comes while too much is waiting is dropped and counted. Only the task that prints a report
sends it, so a fault calls once and not once from every task.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any, Final

from lockstep.foreign import plain
from lockstep.protocol.core.timing import PAGE_SECONDS
from lockstep.runtime import phrases
from lockstep.runtime.startup.pages import Pages

MOST_WAITING: Final = 8
_MAX_ERROR: Final = 200


class Pager:
    """Sends what it is given, in order; any thread may use it, and never waits for it but in ``close``."""

    def __init__(self, pages: Pages, say: Callable[[str], None]) -> None:
        self._pages = pages
        self._say = say
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._failed: set[str] = set()
        self._sent_at = 0.0

    def send(self, fields: Mapping[str, Any]) -> None:
        if not self._pages:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pager", daemon=True)
            self._thread.start()
        self._sent_at = time.monotonic()
        try:
            self._waiting.put_nowait(json.dumps(fields).encode())
        except queue.Full:
            self._say_once(phrases.page_dropped())

    def idle(self) -> bool:
        """Whether everything was sent, or given up."""
        return self._waiting.unfinished_tasks == 0

    def close(self) -> None:
        """Let the last one arrive, for as long as one may take."""
        if self._thread is None:
            return
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(max(0.0, self._sent_at + PAGE_SECONDS - time.monotonic()))

    def _run(self) -> None:
        while (body := self._waiting.get()) is not None:
            if self._pages.command:
                self._tell("--on_verdict", _run_command(self._pages.command, body))
            if self._pages.webhook:
                self._tell("--verdict_webhook", _post(self._pages.webhook, body))
            self._waiting.task_done()

    def _tell(self, flag: str, problem: str) -> None:
        if problem:
            self._say_once(phrases.page_failed(flag, plain(problem)[:_MAX_ERROR]))

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._failed:
            self._failed.add(sentence)
            self._say(sentence)


def _run_command(command: str, body: bytes) -> str:
    """Why it failed; empty if it did not."""
    try:
        process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return error.strerror or str(error)
    with process:
        try:
            _, errors = process.communicate(body, PAGE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"it did not end within {PAGE_SECONDS:g} s, and was killed"
        except OSError as error:  # it closed its end: its exit code tells whether that was meant
            errors = str(error).encode()
        finally:
            with contextlib.suppress(ProcessLookupError):  # whatever it has started ends with it
                os.killpg(process.pid, signal.SIGKILL)
        lines = errors.decode(errors="replace").strip().splitlines()
        code = process.wait()
    return "" if code == 0 else ": ".join([f"exit code {code}", *lines[-1:]])


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A verdict goes where the user sent it, and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, body: bytes) -> str:
    """Why it failed; empty if it did not."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=PAGE_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        with error:
            return f"the answer was {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return str(getattr(reason, "strerror", None) or reason)
