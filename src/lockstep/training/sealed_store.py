"""The store of torch.distributed with a MAC on every entry: whoever reaches its port can spoil entries, not forge them.

Gloo and NCCL find each other by what is in the store; an entry that somebody else has written is refused, so nobody is
led to another address. The key of the MAC is made of the job's key and a random number of every worker, so that entries
of an earlier run are refused too. The job's key itself is never in the store.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import timedelta
from typing import Any, Final

from lockstep.training.torch_private import c10d

_MAC_BYTES: Final = 32
_NONCE_BYTES: Final = 32


class StoreForged(RuntimeError):  # noqa: N818 - reads as the fact it states
    """An entry of the store was not written by a worker of this run."""


class SealedStore(c10d.Store):
    """Every worker of a run makes one around its connection to the store of worker 0. Waits for all of them."""

    def __init__(self, inner: c10d.Store, key: bytes, rank: int, size: int) -> None:
        super().__init__()
        self._inner = inner
        own = secrets.token_hex(_NONCE_BYTES).encode()
        inner.set(f"nonce/{rank}", own)  # type: ignore[arg-type]  # torch takes bytes too
        nonces = [own if other == rank else bytes(inner.get(f"nonce/{other}")) for other in range(size)]
        if any(len(nonce) != len(own) for nonce in nonces):
            raise StoreForged("the random number of a worker in the store is not one")
        self._key = hmac.digest(key, b"".join(nonces), hashlib.sha256)

    def _mac(self, name: str, value: bytes) -> bytes:
        encoded = name.encode()
        return hmac.digest(self._key, len(encoded).to_bytes(4, "little") + encoded + value, hashlib.sha256)

    def set(self, name: str, value: str | bytes) -> None:
        plain = value.encode() if isinstance(value, str) else bytes(value)
        self._inner.set(name, self._mac(name, plain) + plain)  # type: ignore[arg-type]

    def get(self, name: str) -> bytes:
        sealed = bytes(self._inner.get(name))
        value = sealed[_MAC_BYTES:]
        if not hmac.compare_digest(self._mac(name, value), sealed[:_MAC_BYTES]):
            raise StoreForged(f"the entry {name!r} of the store was not written by a worker of this run")
        return value

    def wait(self, *arguments: Any) -> None:
        self._inner.wait(*arguments)

    def check(self, names: list[str]) -> bool:
        return self._inner.check(names)

    def add(self, name: str, amount: int) -> int:
        """A counter, which has no MAC: it says how many there are, not where."""
        return self._inner.add(name, amount)

    def delete_key(self, name: str) -> bool:
        return self._inner.delete_key(name)

    def num_keys(self) -> int:
        return self._inner.num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        self._inner.set_timeout(timeout)
