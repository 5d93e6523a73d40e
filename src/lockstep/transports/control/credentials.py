"""The only place that opens ports and channels of gRPC: both ends of every call prove that they have the key.

A server demands a certificate before it reads a call, so no handler ever meets a caller without the key. The exception
are streams of tensors, at a port of their own, whose handlers demand a proof (``transports/stream/links.py``). With
``--insecure`` everything is plain text and nobody proves anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final

from lockstep.security.certificates import NAME, Certificates, certificates_for
from lockstep.security.chosen import chosen_key
from lockstep.transports.control.addresses import where_now
from lockstep.transports.quiet_grpc import grpc, tls_session

Options = list[tuple[str, int]]

_MOST_SESSIONS: Final = 256


def own_certificates() -> Certificates | None:
    """What this process presents and demands; None for ``--insecure``."""
    key = chosen_key()
    return None if key is None else _of_key(key)


_of_key = functools.cache(certificates_for)


def _server_side(own: Certificates, begun: Callable[[], None]) -> grpc.ServerCredentials:
    shown = grpc.ssl_server_certificate_configuration([(own.private, own.certificate)], own.authority)
    # gRPC asks at every handshake whether there are new certificates; "begun" returns None, for no.
    return grpc.dynamic_ssl_server_credentials(shown, begun, require_client_authentication=True)


@functools.cache
def _client_side(own: Certificates) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(own.authority, own.private, own.certificate)


def add_port(server: grpc.Server, address: str, begun: Callable[[], None]) -> int:
    """Let ``server`` listen at ``host:port``; returns the port. ``RuntimeError`` if it cannot.

    ``begun`` is called on a thread of gRPC when a handshake begins.
    """
    own = own_certificates()
    if own is None:
        return add_plain_port(server, address)
    port: int = server.add_secure_port(address, _server_side(own, begun))
    return port


def add_plain_port(server: grpc.Server, address: str) -> int:
    """The same for callers that prove themselves later, or not at all."""
    port: int = server.add_insecure_port(address)
    return port


def channel_to(address: str, options: Options) -> grpc.Channel:
    """A channel to ``host:port`` that connects with its first call."""
    own = own_certificates()
    if own is None:
        return plain_channel_to(address, options)
    named = [*options, ("grpc.ssl_target_name_override", NAME), ("grpc.ssl_session_cache", _session(own, address))]
    return grpc.secure_channel(f"dns:///{where_now(address)}", _client_side(own), options=named)


@functools.lru_cache(_MOST_SESSIONS)
def _session(_own: Certificates, _address: str) -> object:
    """The last session of these certificates with this address: while a cluster forms, its tasks ask each other's
    monitors again and again, and to resume a session takes half the time of a new one. gRPC finds sessions by the name
    in the certificate, which is the same everywhere, so each address has a place of its own."""
    return tls_session()


def plain_channel_to(address: str, options: Options) -> grpc.Channel:
    """The same without proof, for ``--insecure`` and to find out who was started with it."""
    return grpc.insecure_channel(f"dns:///{where_now(address)}", options=options)
