"""Where the tasks of one job are now. A plain class, which one actor of Ray holds for everybody.

Names stay, addresses change: a task whose node is lost comes back on another one. Every task tells its address with
each question, so a directory that was lost itself is filled again within seconds.
"""

from __future__ import annotations

from collections.abc import Mapping


class Directory:
    """Names with their addresses; the newest life of a task is right, whatever a former one still says."""

    def __init__(self) -> None:
        self._lives: dict[str, int] = {}
        self._addresses: dict[str, str] = {}

    def next_life(self, name: str) -> int:
        """The number of a life that begins."""
        self._lives[name] = self._lives.get(name, 0) + 1
        return self._lives[name]

    def exchange(self, name: str, life: int, address: str) -> Mapping[str, str]:
        """Tell where a life of a task is; returns what is known of all."""
        if life >= self._lives.get(name, 0):
            self._lives[name] = life
            self._addresses[name] = address
        return dict(self._addresses)
