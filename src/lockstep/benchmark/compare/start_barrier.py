"""How a compared program and its parent communicate: lines on its stdin and stdout.

All programs of a run import and warm up at their own pace; the timed steps begin together, when all are ready.
"""

from __future__ import annotations

import json
from typing import Any, TextIO

PORT, READY, GO, RESULT = "port", "ready", "go", "result"


class StartBarrier:
    """The program's end."""

    def __init__(self, given: TextIO, told: TextIO) -> None:
        self._given = given
        self._told = told

    def tell_port(self, port: int) -> None:
        self._tell(f"{PORT} {port}")

    def hear_port(self) -> int:
        return int(self._hear(PORT))

    def pass_through(self) -> None:
        """Warm-up is over: wait for the others."""
        self._tell(READY)
        self._hear(GO)

    def tell_result(self, result: dict[str, Any]) -> None:
        self._tell(f"{RESULT} {json.dumps(result)}")

    def _tell(self, line: str) -> None:
        self._told.write(f"{line}\n")
        self._told.flush()

    def _hear(self, word: str) -> str:
        line = self._given.readline().strip()
        if not line.startswith(word):
            # The parent has ended or given up, so this program does too.
            raise SystemExit(1)
        return line.removeprefix(word).strip()
