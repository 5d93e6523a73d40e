"""Only what a group has opened is cut, and nobody else's."""

from __future__ import annotations

import os
import socket

import pytest

from lockstep.training.ranks.connections import Connections


def test_what_was_opened_within_is_cut_and_its_listener_goes_on() -> None:
    connections = Connections()
    others = socket.socketpair()
    with connections.made_here():
        ours = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0))
    connections.cut()
    assert ours[0].recv(1) == b""
    others[0].sendall(b"!")
    assert others[1].recv(1) == b"!"
    socket.create_connection(listener.getsockname()).close()
    for one in (*ours, *others, listener):
        one.close()


def test_a_descriptor_that_means_another_socket_by_now_is_left_alone() -> None:
    connections = Connections()
    with connections.made_here():
        ours = socket.socketpair()
    others = socket.socketpair()
    for one, other in zip(ours, others, strict=True):
        os.dup2(other.fileno(), one.fileno())
    connections.cut()
    others[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        others[0].recv(1)
    for one in (*ours, *others):
        one.close()
