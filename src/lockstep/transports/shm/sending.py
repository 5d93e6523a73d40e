"""The sending half of an endpoint: which transfers the peer knows, which wait, and how each was decided."""

from __future__ import annotations

import ctypes
from collections import deque
from dataclasses import dataclass

from lockstep.transports.base import Move, TransferId
from lockstep.transports.memory import HostRegion
from lockstep.transports.shm.frames import LOAN, Offer, SignalKind, pack_number, pack_offer, pack_region
from lockstep.transports.shm.memory import SharedRegion
from lockstep.transports.shm.signal_socket import Signals
from lockstep.transports.shm.tokens import TOKENS, Tokens

_WAITING = -1


@dataclass(slots=True, eq=False)
class SharedTransfer:
    """One write or loan that the peer has not answered yet."""

    number: TransferId
    move: Move
    source: HostRegion
    token: int = _WAITING
    given_up: bool = False
    copied: SharedRegion | None = None
    """The copy of a source that the peer cannot map."""

    @property
    def waiting(self) -> bool:
        return self.token == _WAITING


class SendQueue:
    """Offers transfers in the order of the calls. All methods are called under the endpoint's lock and never block."""

    def __init__(self, tokens: Tokens) -> None:
        self.unsettled: dict[TransferId, SharedTransfer] = {}
        self.waiting: deque[SharedTransfer] = deque()
        self._tokens = tokens
        self._free = list(range(TOKENS))
        self._known: set[int] = set()
        self._signals: Signals | None = None
        self.copying: SharedTransfer | None = None

    def open(self, signals: Signals) -> None:
        """The peer has connected."""
        self._signals = signals

    def add(self, transfer: SharedTransfer) -> bool:
        """Take a transfer; True if it has to wait for something that ``pump`` can do."""
        self.unsettled[transfer.number] = transfer
        if not self.waiting and self._may_offer() and isinstance(transfer.source, SharedRegion):
            self._offer(transfer, transfer.source, transfer.move.offset)
            return False
        self.waiting.append(transfer)
        return self._signals is not None

    def _may_offer(self) -> bool:
        return self._signals is not None and bool(self._free)

    def pump(self) -> SharedTransfer | None:
        """Offer what may be offered; the transfer at the head if its source must be copied first."""
        while self.waiting and self._may_offer():
            transfer = self.waiting[0]
            if isinstance(transfer.source, SharedRegion):
                self._offer(transfer, transfer.source, transfer.move.offset)
            elif transfer.copied is not None:
                self._offer(transfer, transfer.copied, 0)
            elif self.copying is None:
                self.copying = transfer
                return transfer
            else:
                return None
            self.waiting.popleft()
        return None

    def _offer(self, transfer: SharedTransfer, source: SharedRegion, offset: int) -> None:
        assert self._signals is not None
        if source.number not in self._known:
            self._known.add(source.number)
            self._signals.send(pack_region(source.number, source.nbytes), [source.descriptor])
        transfer.token = self._free.pop()
        self._tokens.lay_out(transfer.token)
        move = transfer.move
        offer = Offer(
            LOAN if move.loan else 0,
            transfer.token,
            transfer.number,
            source.number,
            offset,
            move.nbytes,
            move.target.region,
            move.target.key,
            move.target_offset,
            move.note,
        )
        self._signals.send(pack_offer(offer))

    def close(self) -> None:
        """The link is over, and every transfer settled."""
        self._tokens.close()

    def forget(self, region: int) -> None:
        """A region is closed: the peer can unmap it."""
        if region in self._known and self._signals is not None:
            self._known.discard(region)
            self._signals.send(pack_number(SignalKind.FORGET, region))

    def answered(self, number: TransferId) -> SharedTransfer | None:
        """The peer has finished this transfer; None if it never had it."""
        transfer = self.unsettled.get(number)
        if transfer is None or transfer.waiting:
            return None
        del self.unsettled[number]
        self._free.append(transfer.token)
        self.let_go(transfer)
        return transfer

    def let_go(self, transfer: SharedTransfer) -> None:
        """Free what was allocated for this transfer alone."""
        if self.copying is transfer:
            self.copying = None
        if transfer.copied is not None:
            self.forget(transfer.copied.number)
            transfer.copied.close()

    def give_up(self, transfer: SharedTransfer) -> bool:
        """Try to take a transfer back; True if the peer will certainly not deliver it."""
        if transfer.given_up:
            return False
        if transfer.waiting:
            if transfer in self.waiting:
                self.waiting.remove(transfer)
            del self.unsettled[transfer.number]
            self.let_go(transfer)
            return True
        transfer.given_up = self._tokens.take(transfer.token)
        return transfer.given_up


def copy_source(transfer: SharedTransfer, into: SharedRegion) -> None:
    """Copy private memory to where the peer can map it, without the interpreter's lock."""
    move = transfer.move
    if move.nbytes:
        ctypes.memmove(into.address, transfer.source.address + move.offset, move.nbytes)
