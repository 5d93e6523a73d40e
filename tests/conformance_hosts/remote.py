"""A node in a separate process (``node_process.py``), driven over a pipe with one JSON object per line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from typing import Any, Final, cast

from conformance_hosts.processes import NodeProcess
from lockstep.protocol.core.messages import Ticket
from lockstep.transports.base import Counters, LinkDownError, PeerAddress, TransportError
from lockstep.transports.conformance.events import PATIENCE, CaseFailed, EventLog, Heard, PeerHasEnded
from lockstep.transports.conformance.node import LocalNode

_PLAIN: Final = {"Ticket": Ticket, "PeerAddress": PeerAddress, "Counters": Counters, "Heard": Heard}
_ERRORS: Final = {"TransportError": TransportError, "LinkDownError": LinkDownError, "gone": PeerHasEnded}


def pack(value: Any) -> Any:
    """A value as JSON; bytes and our few dataclasses are marked by their name."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if dataclasses.is_dataclass(value):
        fields = {field.name: pack(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    return value


def unpack(value: Any) -> Any:
    """What ``pack`` packed."""
    if not isinstance(value, dict):
        return value
    ((name, content),) = value.items()
    if name == "bytes":
        return bytes.fromhex(content)
    return _PLAIN[name](**{field: unpack(inner) for field, inner in content.items()})


class RemoteNode:
    """Has the methods of ``LocalNode``; each call waits for its answer with a deadline."""

    def __init__(self, task: str, incarnation: int, process: NodeProcess) -> None:
        self.task = task
        self.incarnation = incarnation
        self.log = EventLog(task)
        self._answered = threading.Condition()
        self._answer: dict[str, Any] | None = None
        self._process = process
        self._reader = threading.Thread(target=self._read, name=f"suite-{task}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not callable(getattr(LocalNode, name, None)):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._answered:
            self._answer = None
        line = json.dumps({"call": name, "arguments": [pack(argument) for argument in arguments]})
        with contextlib.suppress(OSError):
            self._process.calls.write(line + "\n")
            self._process.calls.flush()
        with self._answered:
            if not self._answered.wait_for(lambda: self._answer is not None, PATIENCE):
                raise CaseFailed(f"{self.task} did not carry out {name} within {PATIENCE:g} s")
            answer = cast(dict[str, Any], self._answer)
        if "error" in answer:
            raise _ERRORS.get(answer["error"], CaseFailed)(f"{answer['text']}")
        return unpack(answer["result"])

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # a broken connection is an end too
            for line in self._process.answers:
                self._take(json.loads(line))
        with self._answered:
            self._answer = {"error": "gone", "text": f"{self.task} has ended"}
            self._answered.notify_all()

    def _take(self, content: dict[str, Any]) -> None:
        if "heard" in content:
            self.log.add(unpack(content["heard"]))
            return
        with self._answered:
            self._answer = content
            self._answered.notify_all()

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._process.kill()

    def freeze(self) -> None:
        """SIGSTOP, and wait until the kernel reports that it has stopped."""
        self._process.freeze()

    def resume(self) -> None:
        """SIGCONT."""
        self._process.resume()

    def close(self) -> None:
        """End the process in an orderly way, or kill it."""
        self.resume()
        with contextlib.suppress(OSError):
            self._process.calls.close()
        try:
            if not self._process.has_ended(10.0):
                self.kill()
                raise CaseFailed(f"{self.task} did not end within 10 s of being closed")
        finally:
            self._reader.join(PATIENCE)
            self._process.close()
