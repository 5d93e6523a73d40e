"""Memory that is lent to a task: the machines know it by a number, the task keeps it."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.transports.base import Loan


class Loans:
    """What has arrived and has not been used or given back. Only the loop touches it."""

    def __init__(self) -> None:
        self._held: dict[int, Loan] = {}
        self._arrivals = 0
        self._read: dict[int, int] = {}
        """Arrivals that are being read and stay here, and by how many."""
        self._unwanted: dict[int, Loan] = {}
        """Given back while they were being read."""

    def keep(self, loan: Loan) -> int:
        """The number of this arrival, never 0."""
        self._arrivals += 1
        self._held[self._arrivals] = loan
        return self._arrivals

    def take(self, arrival: int) -> Loan:
        """Whoever takes a loan gives it back."""
        return self._held.pop(arrival)

    def give_back(self, arrival: int) -> None:
        """Nobody wants it: its memory may be reused, once nobody reads it."""
        loan = self._held.pop(arrival)
        if arrival in self._read:
            self._unwanted[arrival] = loan
        else:
            loan.release()

    def read(self, arrivals: Iterable[int]) -> list[Loan]:
        """These loans, to be read; they stay here. ``read_through`` follows."""
        loans = [self._held[arrival] for arrival in arrivals]
        for arrival in arrivals:
            self._read[arrival] = self._read.get(arrival, 0) + 1
        return loans

    def read_through(self, arrivals: Iterable[int]) -> None:
        for arrival in arrivals:
            self._read[arrival] -= 1
            if self._read[arrival]:
                continue
            del self._read[arrival]
            if (loan := self._unwanted.pop(arrival, None)) is not None:
                loan.release()

    def held(self) -> Iterable[Loan]:
        return self._held.values()
