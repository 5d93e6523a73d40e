"""Transports by the name that ``--server_protocol`` gives them.

A backend is imported only when it is used: its library may be missing on this machine.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Final, Protocol, cast

from lockstep.security.key import Key
from lockstep.transports.base import Transport, TransportError
from lockstep.transports.verbs.options import NIXL_MODULES, NO_OPTIONS, RdmaOptions

if TYPE_CHECKING:
    # Callers that only need names must not wait until gRPC is imported.
    from lockstep.transports.control.server import ControlServer


class TransportFactory(Protocol):
    """Makes a transport for one task. ``server`` is the task's server, not started yet.

    Only transports that use RDMA get options for it.
    """

    def __call__(
        self, server: ControlServer, task: str, incarnation: int, key: Key | None, options: RdmaOptions = ..., /
    ) -> Transport: ...


_WHERE: Final = {
    "auto": "lockstep.transports.auto.transport:AutoTransport",
    "grpc": "lockstep.transports.grpc.transport:GrpcTransport",
    "grpc+tcp": "lockstep.transports.tcp.transport:TcpTransport",
    "grpc+shm": "lockstep.transports.shm.transport:ShmTransport",
    "grpc+ucx": "lockstep.transports.ucx.transport:UcxTransport",
    "grpc+verbs": "lockstep.transports.verbs.transport:VerbsTransport",
}


_ONE_HOST: Final = frozenset({"grpc+shm"})
_RDMA: Final = frozenset({"grpc+verbs"})
_IN_THE_CLEAR: Final = frozenset({"grpc+ucx", "grpc+verbs"})
_LIBRARIES: Final = {"grpc+ucx": NIXL_MODULES, "grpc+verbs": NIXL_MODULES}
_EXTRAS: Final = {"grpc+ucx": "ucx", "grpc+verbs": "ucx"}
_TAKE_RDMA_OPTIONS: Final = frozenset({"auto", "grpc+verbs"})


def moves_by_rdma(transport: str) -> bool:
    """Whether bytes move over this transport without the help of either program."""
    return transport in _RDMA


def in_the_clear(transport: str) -> bool:
    """Whether this transport cannot encrypt; UCX and RDMA cannot even tell who writes."""
    return transport in _IN_THE_CLEAR


def encrypted(name: str) -> str:
    """What a transport is called, where it is measured or tested, as it is with ``--require_private``."""
    return f"{name} encrypted"


def plain_name(name: str) -> tuple[str, bool]:
    """The transport of this name, which may be one of ``encrypted``, and whether it is."""
    plain = next((one for one in _WHERE if encrypted(one) == name), None)
    return plain or name, plain is not None


def stays_on_one_host(name: str) -> bool:
    """Whether this transport can only link tasks on one host."""
    return name in _ONE_HOST


def missing_library(name: str) -> str | None:
    """Why this installation cannot use this transport, with the command that fixes it; None if it can."""
    modules = _LIBRARIES.get(name, ())
    if not modules or any(importlib.util.find_spec(module) is not None for module in modules):
        return None
    extra = _EXTRAS[name]
    return (
        f"{name} needs NIXL, which is not installed; install it with: "
        f"pip install -c constraints.txt 'lockstep-torch[{extra}]' (with CUDA 13: [{extra}-cuda13])"
    )


def machine_problems(name: str, options: RdmaOptions = NO_OPTIONS) -> list[str]:
    """Why this transport cannot be used on this machine, one sentence per problem; cheap to call."""
    missing = missing_library(name)
    if missing is not None:
        return [f"--server_protocol={missing}."]
    if name != "grpc+verbs":
        return []
    from lockstep.transports.verbs.checks import verbs_problems

    return verbs_problems(options)


def runs_here(name: str, options: RdmaOptions = NO_OPTIONS) -> bool:
    """Whether this transport can be used on this machine."""
    return not machine_problems(name, options)


def known_transports() -> tuple[str, ...]:
    """The names that ``make_transport`` knows."""
    return tuple(_WHERE)


def make_transport(
    name: str,
    server: ControlServer,
    task: str,
    incarnation: int,
    key: Key | None,
    options: RdmaOptions = NO_OPTIONS,
    *,
    private: bool = False,
) -> Transport:
    """The transport ``name`` for this incarnation of ``task``; ``TransportError`` lists the known names.

    ``key``: what both ends of every link prove to know; None (``--insecure``): nothing. ``private``: tensors are
    encrypted between hosts, and nothing is used that is ``in_the_clear``.
    """
    if name not in _WHERE:
        nearest = difflib.get_close_matches(name, _WHERE, n=1)
        suggestion = f"; did you mean {nearest[0]}?" if nearest else ""
        raise TransportError(f"there is no transport {name!r}, only {', '.join(_WHERE)}{suggestion}")
    missing = missing_library(name)
    if missing is not None:
        raise TransportError(missing)
    if private and in_the_clear(name):
        raise TransportError(f"{name} cannot encrypt, and --require_private asks for that: use auto or grpc")
    if private and name == "auto":
        from lockstep.transports.auto.transport import AutoTransport

        return AutoTransport(server, task, incarnation, key, options, private=True)
    if private and name == "grpc":
        from lockstep.transports.grpc.transport import GrpcTransport

        return GrpcTransport(server, task, incarnation, key, private=True)
    if private and name == "grpc+tcp":
        from lockstep.transports.tcp.transport import TcpTransport

        return TcpTransport(server, task, incarnation, key, private=True)
    factory = _factory(name)
    if name in _TAKE_RDMA_OPTIONS:
        return factory(server, task, incarnation, key, options)
    return factory(server, task, incarnation, key)


def load_libraries(name: str) -> None:
    """Import now what ``make_transport`` would import later."""
    load = getattr(_factory(name), "load_libraries", None)
    if load is not None:
        load()


def _factory(name: str) -> TransportFactory:
    module, _, attribute = _WHERE[name].partition(":")
    return cast(TransportFactory, getattr(importlib.import_module(module), attribute))
