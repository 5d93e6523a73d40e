"""NIXL for one link: a small typed interface to its agent, with plain numbers and bytes only.

Each link has its own agent, and with it a UCX worker. What the peer writes over the network lands only while
this side drives its worker, and not at all once the agent is gone: a closed link can no longer touch any
memory, although NIXL cannot take back a write that has begun. UCX may not use shared memory for the same reason: there
the writer moves the bytes itself, whatever this side does (on one host use ``grpc+shm``).

Bytes are written, never read: over TCP, UCX aborts the process whose memory is being read when the reader dies.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from lockstep.transports.base import TransportError
from lockstep.transports.control.ports import PortRange, PortsUsedUp, ReservedPort

MODULES: Final = ("nixl_cu12", "nixl_cu13")

Settings = tuple[tuple[str, str], ...]
"""Variables of UCX and their values."""

_QUIET: Final = (("UCX_LOG_LEVEL", "fatal"), ("NIXL_LOG_LEVEL", "FATAL"))
"""We report what these libraries print about a dead peer ourselves, with its name. Users may set these."""

WITHOUT_SHARED_MEMORY: Final = (("UCX_TLS", "^sm"),)


class AgentError(Exception):
    """NIXL failed; the text is its own message."""


@dataclass(frozen=True, slots=True)
class Nixl:
    """NIXL's Python module, and the UCX settings for agents made with it."""

    module: Any
    settings: Settings
    place: tuple[str, PortRange] | None = None
    """Where each agent takes one port, if that is limited."""

    def check_room(self) -> None:
        """UCX tries the ports of a range for ever if all are taken, so look first."""
        if self.place is None:
            return
        try:
            ReservedPort(*self.place).close()
        except PortsUsedUp as error:
            raise AgentError(f"each link over UCX takes one port, and {error}") from None

    def apply_settings(self) -> None:
        """UCX reads its variables in C whenever an agent is made: they are set there.

        ``os.environ`` does not show them, so a child gets them only if it is started without an environment of its own.
        """
        library = ctypes.CDLL(None)
        library.getenv.restype = ctypes.c_char_p
        for name, value in self.settings:
            # Only what differs: other threads may be reading the environment.
            if library.getenv(name.encode()) != value.encode():
                library.setenv(name.encode(), value.encode(), 1)


def load_nixl(settings: Settings = WITHOUT_SHARED_MEMORY, folder: Path | None = None) -> Nixl:
    """NIXL, from ``folder`` if given; ``TransportError`` if it cannot be loaded."""
    library = ctypes.CDLL(None)
    for name, value in _QUIET:
        library.setenv(name.encode(), value.encode(), 0)
    loaded = next((sys.modules[f"{name}._api"] for name in MODULES if f"{name}._api" in sys.modules), None)
    if loaded is None:
        loaded = _import_nixl(folder)
    elif folder is not None and folder not in Path(str(loaded.__file__)).parents:
        raise TransportError("NIXL is already loaded with another libibverbs; use grpc+verbs in a separate process")
    return Nixl(loaded, settings)


def _import_nixl(folder: Path | None) -> Any:
    before = list(sys.path)
    if folder is not None:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    try:
        for module in MODULES:
            if importlib.util.find_spec(module) is not None:
                nixl = importlib.import_module(f"{module}._api")
                nixl.logger.setLevel(logging.ERROR)
                return nixl
    except ImportError as error:
        raise TransportError(f"NIXL is installed but cannot be loaded: {error}") from error
    finally:
        sys.path[:] = before
    raise TransportError("NIXL is not installed")


class Agent:
    """One NIXL agent. Not thread-safe."""

    def __init__(self, nixl: Nixl, name: str) -> None:
        nixl.apply_settings()
        nixl.check_room()
        try:
            config = nixl.module.nixl_agent_config(enable_prog_thread=False)
            self._agent: Any = nixl.module.nixl_agent(name, config)
        except Exception as error:
            raise AgentError(f"NIXL could not be started: {type(error).__name__}: {error}") from error
        self._peer = ""
        self._registered: dict[int, Any] = {}

    def connection(self) -> bytes:
        """What the peer's agent needs to reach this one."""
        return bytes(self._call(lambda: self._agent.get_agent_metadata()))

    def meet(self, metadata: bytes) -> None:
        """Learn where the peer is, or about one more of its regions."""
        name = self._call(lambda: self._agent.add_remote_agent(metadata))
        self._peer = name.decode() if isinstance(name, bytes) else str(name)

    def register(self, number: int, address: int, nbytes: int, device: int | None = None) -> None:
        """Register a range of this process's memory, once; ``device``: the GPU that it belongs to."""
        if number not in self._registered:
            described = [(address, nbytes, device or 0, "")]
            self._registered[number] = self._call(lambda: self._agent.register_memory(described, _kind(device)))

    def forget(self, number: int) -> None:
        """A region is closed."""
        registered = self._registered.pop(number, None)
        if registered is not None:
            self._call(lambda: self._agent.deregister_memory(registered))

    def metadata_of(self, number: int) -> bytes:
        """What the peer needs to write into a registered region."""
        registered = self._registered[number]
        return bytes(self._call(lambda: self._agent.get_partial_agent_metadata(registered, True, ["UCX"])))

    def begin_write(
        self, address: int, remote_address: int, nbytes: int, devices: tuple[int | None, int | None] = (None, None)
    ) -> Any:
        """Start a write into the peer's memory; a handle for ``is_done``. ``devices``: our GPU and the peer's."""
        here, there = devices

        def begin() -> Any:
            local = self._agent.get_xfer_descs([(address, nbytes, here or 0)], _kind(here))
            remote = self._agent.get_xfer_descs([(remote_address, nbytes, there or 0)], _kind(there))
            handle = self._agent.initialize_xfer("WRITE", local, remote, self._peer)
            if self._agent.transfer(handle) == "ERR":
                raise AgentError("a write could not be started")
            return handle

        return self._call(begin)

    def is_done(self, handle: Any) -> bool:
        """Drive the worker; whether all bytes of a write are in the peer's memory."""
        state = self._call(lambda: self._agent.check_xfer_state(handle))
        if state == "ERR":
            raise AgentError("a write failed in transit")
        if state == "DONE":
            self._call(lambda: self._agent.release_xfer_handle(handle))
        return bool(state == "DONE")

    def progress(self) -> None:
        """Drive the worker, so that what the peer writes lands."""
        self._call(lambda: self._agent.get_new_notifs())

    def close(self) -> None:
        """From now on nothing lands, and nothing is written."""
        self._registered.clear()
        self._agent = None

    def _call(self, what: Any) -> Any:
        try:
            return what()
        except AgentError:
            raise
        except Exception as error:
            raise AgentError(f"{type(error).__name__.removeprefix('nixl')}: {error}") from error


def _kind(device: int | None) -> str:
    """What NIXL calls memory of the host, or of a GPU."""
    return "DRAM" if device is None else "VRAM"
