"""NIXL for one link: a small typed face of its agent, with plain numbers and bytes only.

Each link has an agent, and with it a UCX worker, of its own. What the peer writes over the network lands only while
this side drives its worker, and not at all once the agent is gone: so a link that was closed can touch no memory any
more, although NIXL cannot take back a write that was begun. Shared memory is left out of what UCX may use for the same
reason: there the writer's own hands move the bytes, whatever this side does (on one host use ``grpc+shm``).

Bytes are written, never read: over TCP, UCX aborts the process whose memory is being read when the reader dies.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
from typing import Any, Final

from lockstep.transports.base import TransportError

MODULES: Final = ("nixl_cu12", "nixl_cu13")

_SETTINGS: Final = (
    ("UCX_TLS", "^sm", True),
    # What these libraries print about a peer that died, we say ourselves, with its name.
    ("UCX_LOG_LEVEL", "fatal", False),
    ("NIXL_LOG_LEVEL", "FATAL", False),
)
"""Variable, value, and whether it counts even where the user has set it. UCX reads them when an agent is made."""


class AgentError(Exception):
    """NIXL could not do it; the text is what it said."""


def load_nixl() -> Any:
    """NIXL's Python module, with its settings in place; ``TransportError`` where it cannot be loaded."""
    library = ctypes.CDLL(None)
    for name, value, always in _SETTINGS:
        # Set in C, where UCX reads them, and not for this program's children.
        library.setenv(name.encode(), value.encode(), int(always))
    for module in MODULES:
        if importlib.util.find_spec(module) is None:
            continue
        try:
            nixl = importlib.import_module(f"{module}._api")
        except ImportError as error:
            raise TransportError(f"NIXL is installed and cannot be loaded: {error}") from error
        nixl.logger.setLevel(logging.ERROR)
        return nixl
    raise TransportError("NIXL is not installed")


class Agent:
    """One NIXL agent. Not for several threads at the same time."""

    def __init__(self, nixl: Any, name: str) -> None:
        try:
            config = nixl.nixl_agent_config(enable_prog_thread=False)
            self._agent: Any = nixl.nixl_agent(name, config)
        except Exception as error:
            raise AgentError(f"NIXL could not be started: {type(error).__name__}: {error}") from error
        self._peer = ""
        self._registered: dict[int, Any] = {}

    def connection(self) -> bytes:
        """What the peer's agent needs to reach this one."""
        return bytes(self._call(lambda: self._agent.get_agent_metadata()))

    def meet(self, metadata: bytes) -> None:
        """Learn where the peer is, or of one more region of it."""
        name = self._call(lambda: self._agent.add_remote_agent(metadata))
        self._peer = name.decode() if isinstance(name, bytes) else str(name)

    def register(self, number: int, address: int, nbytes: int) -> None:
        """Let a range of this process's memory take part, once."""
        if number not in self._registered:
            described = [(address, nbytes, 0, "")]
            self._registered[number] = self._call(lambda: self._agent.register_memory(described, "DRAM"))

    def forget(self, number: int) -> None:
        """A region is closed."""
        registered = self._registered.pop(number, None)
        if registered is not None:
            self._call(lambda: self._agent.deregister_memory(registered))

    def metadata_of(self, number: int) -> bytes:
        """What the peer needs to write into a registered region."""
        registered = self._registered[number]
        return bytes(self._call(lambda: self._agent.get_partial_agent_metadata(registered, True, ["UCX"])))

    def begin_write(self, address: int, remote_address: int, nbytes: int) -> Any:
        """Start a write into the peer's memory; a handle for ``is_done``."""

        def begin() -> Any:
            local = self._agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(remote_address, nbytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
            if self._agent.transfer(handle) == "ERR":
                raise AgentError("a write could not be started")
            return handle

        return self._call(begin)

    def is_done(self, handle: Any) -> bool:
        """Drive the worker; whether all bytes of a write are in the peer's memory."""
        state = self._call(lambda: self._agent.check_xfer_state(handle))
        if state == "ERR":
            raise AgentError("a write failed on the way")
        if state == "DONE":
            self._call(lambda: self._agent.release_xfer_handle(handle))
        return bool(state == "DONE")

    def progress(self) -> None:
        """Drive the worker: what the peer writes lands meanwhile."""
        self._call(lambda: self._agent.get_new_notifs())

    def close(self) -> None:
        """Nothing lands any more, and nothing is written."""
        self._registered.clear()
        self._agent = None

    def _call(self, what: Any) -> Any:
        try:
            return what()
        except AgentError:
            raise
        except Exception as error:
            raise AgentError(f"{type(error).__name__.removeprefix('nixl')}: {error}") from error
