"""Carries out faults (``protocol/core/faults.py``) in a real task. Only drills and tests give a node any.

A node without faults has None here, and each seam checks for that once: it costs nothing if nothing is planted.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from lockstep.drill_stubs import (
    compiler_that_takes_long,
    synchronize,
    user_code_that_loops,
    user_code_that_waits,
    user_code_that_writes,
)
from lockstep.protocol.core.activity import Doing
from lockstep.protocol.core.faults import (
    BlockCallback,
    BlockLoop,
    CallExit,
    CloseDescriptors,
    Die,
    DropMessage,
    DropTensor,
    Fault,
    FaultPlace,
    Freeze,
    HitReaders,
    Raise,
    SlowCheckpoint,
    SlowReads,
    SlowSteps,
    SlowStore,
    Stick,
)
from lockstep.protocol.core.ids import Step, TaskId
from lockstep.protocol.core.messages import Message
from lockstep.runtime import processes
from lockstep.runtime.watch.status import MainThread

OnInjected = Callable[[str], None]


class Victim(Protocol):
    """What a fault needs from the node it strikes."""

    main: MainThread

    def wait_version(self, version: int) -> int: ...


class Injector:
    """The faults of one task. ``on_injected`` is called the moment each begins."""

    def __init__(self, task: TaskId, faults: Sequence[Fault], on_injected: OnInjected) -> None:
        self._faults = [fault for fault in faults if getattr(fault, "task", "") == str(task)]
        self._on_injected = on_injected
        self._hits: dict[int, int] = {}
        self._told: set[int] = set()
        self._lock = threading.Lock()
        self._step: Step = -1

    @classmethod
    def of(cls, task: TaskId, faults: Sequence[Fault], on_injected: OnInjected) -> Injector | None:
        """None where nothing is planted."""
        return cls(task, faults, on_injected) if faults else None

    def _begins(self, fault: Fault) -> None:
        with self._lock:
            first = id(fault) not in self._told
            self._told.add(id(fault))
        if first:
            self._on_injected(type(fault).__name__)

    def _strikes(self, fault: DropMessage | DropTensor) -> bool:
        """Whether this fault has hits left."""
        with self._lock:
            done = self._hits.get(id(fault), 0)
            if fault.times and done >= fault.times:
                return False
            self._hits[id(fault)] = done + 1
        self._begins(fault)
        return True

    # -- links --

    def drops_message(self, peer: TaskId, message: Message) -> bool:
        """Whether this message to ``peer`` gets lost."""
        return any(
            isinstance(fault, DropMessage) and fault.hits(peer, message) and self._strikes(fault)
            for fault in self._faults
        )

    def drops_tensor(self, peer: TaskId, number: int, bucket: int) -> bool:
        """Whether this transfer to ``peer`` counts as sent and never arrives."""
        return any(
            isinstance(fault, DropTensor) and fault.hits(peer, number, bucket) and self._strikes(fault)
            for fault in self._faults
        )

    def in_callback(self, peer: TaskId, callback: str) -> None:
        """A callback of the link to ``peer`` runs: it may be made to block."""
        for fault in self._faults:
            if not isinstance(fault, BlockCallback) or (fault.peer, fault.callback) != (str(peer), callback):
                continue
            if self._step >= fault.step and id(fault) not in self._told:
                self._begins(fault)
                _blocking_copy(fault.seconds)

    # -- a worker's training thread --

    def at_step(self, victim: Victim, step: Step) -> None:
        """The training thread is about to begin ``step``."""
        self._step = step
        for fault in self._faults:
            if isinstance(fault, SlowSteps) and step >= fault.step:
                self._begins(fault)
                _spin(fault.seconds)
            elif getattr(fault, "step", -1) == step:
                self._strike_at_step(fault, victim, step)

    def _strike_at_step(self, fault: Fault, victim: Victim, step: Step) -> None:
        match fault:
            case Freeze():
                self._begins(fault)
                os.kill(os.getpid(), signal.SIGSTOP)
            case Die(signum=0, exit_code=code):
                self._begins(fault)
                os._exit(code)
            case Die(signum=signum):
                self._begins(fault)
                os.kill(os.getpid(), signum)
            case Raise(errno=number, text=text):
                self._begins(fault)
                raise OSError(number, os.strerror(number), text) if number else RuntimeError(text)
            case CallExit(code=code):
                self._begins(fault)
                sys.exit(code)
            case CloseDescriptors(seconds=seconds):
                self._begins(fault)
                os.closerange(0, os.sysconf("SC_OPEN_MAX"))
                user_code_that_waits(seconds)
            case SlowCheckpoint(seconds=seconds, folder=folder):
                self._begins(fault)
                with victim.main.during(Doing.CHECKPOINT, folder):
                    user_code_that_writes(seconds, folder)
            case HitReaders(signum=signum, seconds=seconds):
                self._begins(fault)
                _hit_children(signum, seconds)
            case SlowReads():
                self._begins(fault)  # the input of the drill carries it out
            case Stick():
                self._begins(fault)
                self._stick(fault, victim, step)
            case _:
                return

    def _stick(self, fault: Stick, victim: Victim, step: Step) -> None:
        match fault.place:
            case FaultPlace.BEFORE_PRODUCING:
                victim.wait_version(step + 1)
            case FaultPlace.USER_CODE:
                user_code_that_waits(fault.seconds)
            case FaultPlace.LOOP:
                user_code_that_loops(fault.seconds)
            case FaultPlace.COMPILER:
                compiler_that_takes_long(fault.seconds)
            case FaultPlace.DEVICE | FaultPlace.NO_DEVICE:
                victim.main.on_device = fault.place == FaultPlace.DEVICE
                synchronize(fault.seconds)
            case place:
                with victim.main.during(Doing(place), fault.detail):
                    user_code_that_waits(fault.seconds)

    # -- a server, and the loop of either --

    def in_store(self, step: Step) -> None:
        """The store is about to make the next version out of ``step``."""
        self._step = max(self._step, step)
        for fault in self._faults:
            if isinstance(fault, SlowStore) and step >= fault.step:
                self._begins(fault)
                if fault.busy:
                    _spin(fault.seconds)
                else:
                    _blocking_copy(fault.seconds)
            elif isinstance(fault, Freeze | Die) and fault.step == step and id(fault) not in self._told:
                self._begins(fault)
                os.kill(os.getpid(), signal.SIGSTOP if isinstance(fault, Freeze) else fault.signum)

    def in_loop(self, step: Step) -> None:
        """The loop carries out an effect."""
        for fault in self._faults:
            if isinstance(fault, BlockLoop) and step >= fault.step and id(fault) not in self._told:
                self._begins(fault)
                _blocking_copy(fault.seconds)


def _hit_children(signum: int, seconds: float) -> None:
    pids = [child.pid for child in processes.descendants(os.getpid())]
    for pid in pids:
        processes.send_signal(pid, signum)
    if seconds:
        resume = [threading.Timer(seconds, processes.send_signal, (pid, signal.SIGCONT)) for pid in pids]
        for timer in resume:
            timer.daemon = True
            timer.start()


def _spin(seconds: float) -> None:
    """Use the CPU for this long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        sum(range(2000))


def _blocking_copy(seconds: float) -> None:
    """What a callback must not do: wait for a copy that never finishes."""
    threading.Event().wait(seconds)
