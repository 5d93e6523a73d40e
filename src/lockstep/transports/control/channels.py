"""Channels to other processes, and the gRPC options that both ends share.

Proxy variables are ignored: the peers of a cluster are reached directly, and a proxy that answers in their place
is a classic reason why a cluster does not start.
"""

from __future__ import annotations

import resource
from typing import Final

from lockstep.transports.control.codec import MAX_JOINED_BYTES
from lockstep.transports.control.credentials import Options, channel_to, plain_channel_to
from lockstep.transports.quiet_grpc import grpc

MAX_FRAME_BYTES: Final = 2 << 20
"""Largest message of a data stream: a chunk of 1 MiB, its header, and room to spare."""

_MOST_DESCRIPTORS: Final = 1 << 20
_RESERVE: Final = 256
PLAIN: Final = "plain://"
"""Before the address of a port without TLS, which only streams of tensors have."""

_CONNECT_MS: Final = 5_000
_PING_MS: Final = 30_000
_PING_PATIENCE_MS: Final = 600_000
"""A frozen peer must not lose its connection: heartbeats notice it, and it may continue. The pings are for hosts that
vanished silently. This number also becomes TCP_USER_TIMEOUT, whose default in gRPC servers (20 s) would cut off a
peer that is stopped in a debugger."""


def _shared_options() -> Options:
    return [
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_timeout_ms", _PING_PATIENCE_MS),
        ("grpc.http2.max_pings_without_data", 2),
        # Reading far ahead in large frames: 2.0 GB/s instead of 1.5 for streams of 1 MiB chunks over loopback.
        ("grpc.http2.lookahead_bytes", 16 << 20),
        ("grpc.http2.max_frame_size", 1 << 20),
    ]


def _most_connections() -> int:
    """Of each of a task's two ports. Silent connections must leave descriptors for checkpoints; those that do not shake
    hands end after seconds."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(limit, _MOST_DESCRIPTORS)
    return (most - max(most // 4, min(_RESERVE, most // 2))) // 2


def server_options(max_bytes: int, *, plain: bool = False) -> Options:
    """For ``grpc.server``. Where anybody can connect (``plain``), a connection without a stream ends after seconds."""
    return [
        *([("grpc.max_connection_idle_ms", _CONNECT_MS)] if plain else []),
        *_shared_options(),
        ("grpc.so_reuseport", 0),
        ("grpc.max_allowed_incoming_connections", _most_connections()),
        ("grpc.server_handshake_timeout_ms", _CONNECT_MS),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
        # Never answer a client's pings with GOAWAY "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 3),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _client_options(max_bytes: int) -> Options:
    return [
        *_shared_options(),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        # A separate connection: closing or clogging one link must not affect another to the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),  # gRPC's name for the time limit of one attempt to connect
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", max_bytes),
    ]


def open_channel(address: str) -> grpc.Channel:
    """A channel for control messages to ``host:port``. It connects with its first call; close it when done."""
    return channel_to(address, _client_options(MAX_JOINED_BYTES))


def open_plain_channel(address: str) -> grpc.Channel:
    """A channel without proof, to find out whether what listens there was started with ``--insecure``."""
    return plain_channel_to(address, _client_options(MAX_FRAME_BYTES))


def is_plain(address: str) -> bool:
    """Whether this published address is that of a port without TLS."""
    return address.startswith(PLAIN)


def open_data_channel(address: str) -> grpc.Channel:
    """A channel for a data stream to the address that its acceptor has published."""
    if is_plain(address):
        return open_plain_channel(address.removeprefix(PLAIN))
    return channel_to(address, _client_options(MAX_FRAME_BYTES))
