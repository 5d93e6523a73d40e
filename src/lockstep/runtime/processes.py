"""What Linux offers so that no process outlives the one that started it.

Standard library only and quick to import: the reaper of a task (``monitor/reaper.py``) runs on this file alone,
without site-packages.

Three mechanisms are used together, because each has a gap:

* a *parent death signal* kills a child when its parent dies, even by SIGKILL; the child's own children do not inherit
  it, and it is tied to the parent's *thread*, so such children are started on a main thread only;
* a *subreaper* adopts orphaned descendants, even those that started their own session, so it can find and end them;
* the end of a *pipe* shows a process that another one is gone, whatever killed it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people, batch systems and closed terminals send to end a program."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}): {os.strerror(error)}")


def die_with_parent(parent_pid: int, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send ``signum`` to this process when its parent dies; end at once if it is already dead."""
    _prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def become_subreaper() -> None:
    """Adopt the orphans among all future descendants of this process."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def let_read_stacks(pid: int) -> None:
    """Let ``pid`` and its children read this process' memory where the kernel allows only ancestors to (Yama)."""
    try:
        _prctl(_PR_SET_PTRACER, pid)
    except OSError:
        return  # a kernel without Yama has no such restriction


def python_without_site(code: str, *arguments: str) -> list[str]:
    """A command that runs ``code`` in a bare interpreter (no site-packages) that can import this package."""
    root = str(Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append(sys.argv[1]); {code}", root, *arguments]


def dies_with_this_process(command: Sequence[str]) -> list[str]:
    """``command``, to be started by this process' main thread, so that it receives SIGKILL when this process dies.

    The signal is set in the new process just before ``exec``: setting it between fork and exec (``preexec_fn``) is
    not safe in a program with threads.
    """
    code = "from lockstep.runtime import processes; processes.exec_guarded(int(sys.argv[2]), sys.argv[3:])"
    return python_without_site(code, str(os.getpid()), *command)


@contextlib.contextmanager
def stop_signals_held() -> Iterator[None]:
    """A process started inside receives stop signals only once its ``SignalInbox`` is ready; this one, afterwards."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def exec_guarded(parent_pid: int, command: Sequence[str]) -> None:
    """Become ``command``, with a parent death signal; the second half of ``dies_with_this_process``."""
    die_with_parent(parent_pid)
    restore_signals()
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        sys.stderr.write(f"lockstep: cannot start {command[0]}: {error.strerror}\n")
        os._exit(127)


def restore_signals() -> None:
    """Reset the signals that Python ignores or handles, as a program that is about to start expects."""
    for signum in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGQUIT, *STOP_SIGNALS):
        signal.signal(signum, signal.SIG_DFL)


def signal_name(signum: int) -> str:
    """``SIGKILL`` for 9; a number for real-time signals."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """What the kernel reports about a process, whether or not the process itself responds."""

    pid: int
    parent: int
    name: str
    state: str
    """In words."""
    stopped: bool
    """By a signal or a debugger."""
    dead: bool
    """It has ended, though its parent may not have reaped it yet."""
    threads: int
    cpu_seconds: float
    resident_bytes: int

    @property
    def wants_processor(self) -> bool:
        """It runs, or would if the machine were not so busy."""
        return self.state == _STATE_WORDS["R"]


_STATE_WORDS = {
    "R": "running",
    "S": "sleeping",
    "D": "in an uninterruptible system call",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead, not reaped yet",
    "X": "dead",
    "I": "idle",
}


def process_facts(pid: int) -> ProcessFacts | None:
    """Read ``/proc/<pid>/stat``; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name = text[text.index("(") + 1 : text.rindex(")")]  # the name itself may hold spaces and parentheses
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessFacts(
        pid=pid,
        parent=int(fields[1]),
        name=name,
        state=_STATE_WORDS.get(fields[0], fields[0]),
        stopped=fields[0] in "Tt",
        dead=fields[0] in "ZX",
        threads=int(fields[17]),
        cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        resident_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


_EXIT_CODE_FIELD = 49
"""In ``/proc/PID/stat``, counted from the state of the process on."""


def exit_code_unreaped(pid: int) -> int | None:
    """How somebody else's child has ended, as long as its parent has not reaped it; None after that."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        fields = text[text.rindex(")") + 2 :].split()
        if fields[0] in "ZX":
            return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE_FIELD]))
    return None


def catches(pid: int, signum: int) -> bool:
    """Whether this process has a handler for the signal, which would else kill it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    masks = [line.removeprefix("SigCgt:") for line in lines if line.startswith("SigCgt:")]
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")


def uses_device(pid: int) -> bool:
    """Whether this process has opened a GPU, according to the kernel; False where that cannot be seen."""
    try:
        opened = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return False
    for path in opened:
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(_DEVICES):
                return True
    return False


def all_processes() -> list[ProcessFacts]:
    """Every process that is visible from here."""
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdecimal())
    return [facts for facts in map(process_facts, pids) if facts is not None]


def descendants(pid: int, keep: Collection[int] = ()) -> list[ProcessFacts]:
    """Children of ``pid``, their children, and so on; parents before their children. Not those in ``keep``, nor what
    is below them."""
    children: dict[int, list[ProcessFacts]] = {}
    for facts in all_processes():
        children.setdefault(facts.parent, []).append(facts)
    found: list[ProcessFacts] = []
    queue = [pid]
    while queue:
        below = [facts for facts in children.get(queue.pop(0), []) if facts.pid not in keep]
        found.extend(below)
        queue.extend(facts.pid for facts in below)
    return found


def send_signal(pid: int, signum: int) -> None:
    """Signal a child that was not reaped yet, so its pid is still its own; it is no error if it has just ended."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return


def remove_cuda_memory(pid: int, folder: Path = Path("/dev/shm")) -> None:
    """Remove what CUDA leaves in memory forever if a process, which has ended, shared an event with another."""
    for path in folder.glob(f"cuda.shm.*.{pid:x}.*"):
        with contextlib.suppress(OSError):
            if path.stat().st_uid == os.getuid():
                path.unlink()


def end_descendants(grace: float, patience: float, keep: Collection[int] = ()) -> list[ProcessFacts]:
    """Reap all children of this process, a subreaper; kill those that do not end on their own within ``grace``.
    Children in ``keep`` stay, with all that is below them.

    The grace is for processes that clean up after a parent's death and then end, such as the resource tracker of
    ``multiprocessing``. Returns those that could not be killed within ``patience``: they are stuck in the kernel.
    """
    start = time.monotonic()
    while not reap_children():
        waited = time.monotonic() - start
        left = descendants(os.getpid(), keep) if keep or waited >= min(grace, patience) else []
        if (keep and not left) or waited > patience:
            return left
        if waited >= grace:
            for facts in left:
                send_signal(facts.pid, signal.SIGKILL)
        # No descriptor reports the death of adopted children, and a signal could be merged with an earlier one.
        time.sleep(0.01)
    return []


def reap_children(on_reaped: Callable[[int, int], None] | None = None) -> bool:
    """Reap what has ended, calling ``on_reaped(pid, exit code)``; True if no child is left."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True
        if pid == 0:
            return False
        if on_reaped is not None:
            on_reaped(pid, os.waitstatus_to_exitcode(status))


class SignalInbox:
    """Turns signals into bytes on a descriptor, for a loop that waits on descriptors. Main thread only.

    A handler that raises would hit the loop at any instruction; a loop that only polls would see a signal late.
    A stop signal that is ignored stays ignored: a user who started this program with ``nohup`` wanted that.

    With ``until_exit`` the signals are ignored after the block, for a program that ends then: one more Ctrl-C must not
    change its exit code, or cause a traceback.
    """

    def __init__(self, signums: Iterable[int], until_exit: bool = False) -> None:
        self._signums = tuple(signums)
        self._until_exit = until_exit
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._previous_wakeup = -1

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in self._signums:
            if signum in STOP_SIGNALS and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._previous[signum] = signal.signal(signum, _noted_by_the_wakeup_descriptor)
        # The process that started this program may have held them back until now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self._previous)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            before = signal.SIG_DFL if handler is None else handler
            signal.signal(signum, signal.SIG_IGN if self._until_exit else before)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Readable when a signal has arrived."""
        return self._reader.fileno()

    def take(self) -> list[int]:
        """The signals that arrived since the last call, in order."""
        try:
            return [signum for signum in self._reader.recv(4096) if signum in self._signums]
        except BlockingIOError:
            return []


def _noted_by_the_wakeup_descriptor(_signum: int, _frame: FrameType | None) -> None:
    return


def wait_readable(descriptors: Iterable[int], seconds: float | None) -> set[int]:
    """Which of these descriptors have something to read, or reach their end, within ``seconds``."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    timeout = None if seconds is None else max(0, int(seconds * 1000 + 0.999))
    return {descriptor for descriptor, _event in poller.poll(timeout)}


def read_available(descriptor: int, limit: int = 65536) -> bytes | None:
    """What a non-blocking descriptor holds now; None at its end."""
    try:
        data = os.read(descriptor, limit)
    except BlockingIOError:
        return b""
    return data or None
