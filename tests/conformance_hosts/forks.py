"""Node processes that start fast: forked from one that has imported what nodes need and done nothing else.

A new Python takes half a second to start (ten on an emulated host), and most cases of a suite between two hosts start
a node.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from conformance_hosts import node_process
from lockstep.transports.conformance.events import PATIENCE, CaseFailed
from lockstep.transports.registry import load_libraries

_LONGEST_ORDER: Final = 4096
_STOPPED: Final = "T"


class ForkedNode:
    """A node process that is not a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._signal(signal.SIGKILL)
        if not self.has_ended(PATIENCE):
            raise CaseFailed(f"process {self.pid} was killed but is not gone after {PATIENCE:g} s")

    def freeze(self) -> None:
        """SIGSTOP, and wait for it to take effect."""
        self._signal(signal.SIGSTOP)
        pause = threading.Event()
        for _ in range(int(PATIENCE / 0.01)):
            if self.has_ended(0):
                raise CaseFailed(f"process {self.pid} ended instead of being frozen")
            if _state(self.pid) == _STOPPED:
                return
            pause.wait(0.01)
        raise CaseFailed(f"process {self.pid} could not be frozen")

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def has_ended(self, seconds: float) -> bool:
        """Whether it ends within this many seconds."""
        return bool(select.select([self._ended], [], [], seconds)[0])

    def close(self) -> None:
        """Release it."""
        os.close(self._ended)

    def _signal(self, number: signal.Signals) -> None:
        if not self.has_ended(0):
            signal.pidfd_send_signal(self._ended, number)


class Forks:
    """Starts node processes. Create it before this process has any threads; what it starts ends with its input."""

    def __init__(self) -> None:
        self._order, orders = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._one_at_a_time = threading.Lock()
        sys.stdout.flush()
        if os.fork() == 0:
            _never_return(lambda: _obey(orders), self._order)
        orders.close()
        self._order.settimeout(3 * PATIENCE)  # the first order imports, which is slow on an emulated host

    def start(self, arguments: list[str], stdin: int, stdout: int) -> ForkedNode:
        """A process of ``node_process.py`` with these arguments that reads and writes these descriptors."""
        try:
            with self._one_at_a_time:
                socket.send_fds(self._order, [json.dumps(arguments).encode()], [stdin, stdout])
                pid = self._order.recv(_LONGEST_ORDER)
            if not pid:
                raise CaseFailed("a node process could not be forked: the process that forks has ended")
            return ForkedNode(int(pid))
        except OSError as error:
            raise CaseFailed(f"a node process could not be forked: {error}") from error

    def close(self) -> None:
        """Start no more processes."""
        self._order.close()


def _never_return(work: Callable[[], None], *others: socket.socket) -> NoReturn:
    """In a process that was just forked: do this and end. It must not continue as a copy of the caller's program.

    ``others``: ends of sockets that this process does not need.
    """
    code = 1
    try:
        for end in others:
            end.close()
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is printed, and this process ends
        traceback.print_exc()
    finally:
        os._exit(code)


def _obey(orders: socket.socket) -> None:
    """In the forking process: serve orders until the process that gives them is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the process that gives the orders
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the dead children
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, _LONGEST_ORDER, 2)
        if not order:
            return
        arguments = json.loads(order)
        load_libraries(arguments[0])  # the first order for a transport imports it, for all that follow
        pid = os.fork()
        if pid == 0:
            _never_return(functools.partial(_become_node, arguments, *descriptors), orders)
        for descriptor in descriptors:
            os.close(descriptor)
        orders.send(str(pid).encode())


def _become_node(arguments: list[str], stdin: int, stdout: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    sys.argv[1:] = arguments
    node_process.main()


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process; empty once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
