"""Memory that is lent to a task: the machines know it by a number, the task keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.transports.base import Loan


class Loans:
    """What has arrived and has not been used or given back. Only the loop touches it."""

    def __init__(self) -> None:
        self._held: dict[int, Loan] = {}
        self._arrivals = 0

    def keep(self, loan: Loan) -> int:
        """The number of this arrival, never 0."""
        self._arrivals += 1
        self._held[self._arrivals] = loan
        return self._arrivals

    def take(self, arrival: int) -> Loan:
        """Whoever takes a loan gives it back."""
        return self._held.pop(arrival)

    def held(self) -> Iterable[Loan]:
        return self._held.values()
