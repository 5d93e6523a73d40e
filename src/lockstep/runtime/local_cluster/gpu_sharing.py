"""NVIDIA's MPS for a local cluster: tasks on one GPU compute side by side instead of taking turns.

Without it the GPU gives each process a few milliseconds in turn, even one that only waits for another. The daemon
belongs to this cluster alone: its tasks find it through a private folder, and it ends with the cluster, however that
ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Final

from lockstep.runtime.monitor.reaper import reaper_command

CONTROL: Final = "nvidia-cuda-mps-control"
PIPES: Final = "CUDA_MPS_PIPE_DIRECTORY"
LOGS: Final = "CUDA_MPS_LOG_DIRECTORY"
USUAL_PIPES: Final = Path("/tmp/nvidia-mps")
START_SECONDS: Final = 5.0
END_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02

Say = Callable[[str], None]


def why_not(environment: Mapping[str, str]) -> str | None:
    """Why no daemon is started here; empty if one runs already, None if one can be started."""
    if PIPES in environment or (USUAL_PIPES / "control").exists():
        return ""
    if shutil.which(CONTROL, path=environment.get("PATH")) is None:
        return f"{CONTROL} is not installed on this machine"
    return None


@contextlib.contextmanager
def shared_gpu(environment: MutableMapping[str, str], say: Say) -> Iterator[None]:
    """Processes that are started inside with this environment share GPUs through MPS, if possible."""
    reason = why_not(environment)
    if reason is not None:
        if reason:
            say(f"server and workers take turns on a GPU: {reason}")
        yield
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-mps-") as folder:
        told = {PIPES: folder, LOGS: folder}
        with _daemon({**environment, **told}, Path(folder)) as problem:
            if problem:
                say(f"server and workers take turns on a GPU: NVIDIA's MPS did not start: {problem}")
                yield
                return
            environment.update(told)
            try:
                yield
            finally:
                for name in told:
                    environment.pop(name, None)


@contextlib.contextmanager
def _daemon(environment: Mapping[str, str], folder: Path) -> Iterator[str]:
    """A daemon that runs during this block, under a reaper; yields why it did not start, or an empty text."""
    commands, ending = os.pipe()
    status, telling = os.pipe()
    # The reaper closes the last pipe, on which a task would send reports.
    unread, report = os.pipe()
    with (folder / "output").open("wb") as output:
        reaper = subprocess.Popen(
            reaper_command(commands, telling, report, [CONTROL, "-f"]),
            pass_fds=(commands, telling, report),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
        )
    for descriptor in (commands, telling, report, unread):
        os.close(descriptor)
    try:
        problem = _when_up(reaper, folder)
        yield problem
        if not problem:
            _end(reaper, environment)
    finally:
        os.close(ending)  # the reaper kills what is left
        os.close(status)
        try:
            reaper.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            reaper.kill()
            reaper.wait(END_SECONDS)


def _when_up(reaper: subprocess.Popen[bytes], folder: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not (folder / "control").exists():
        if reaper.poll() is not None:
            lines = (folder / "output").read_text(errors="replace").strip().splitlines()
            return lines[-1] if lines else "it ended at once"
        if time.monotonic() > deadline:
            return f"it was not ready after {START_SECONDS:g} s"
        time.sleep(_POLL_SECONDS)
    return ""


def _end(reaper: subprocess.Popen[bytes], environment: Mapping[str, str]) -> None:
    """Asks the daemon to end, and lets it: whoever asks is answered before the daemon has tidied up."""
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            [CONTROL], input=b"quit\n", env=dict(environment), capture_output=True, timeout=END_SECONDS, check=False
        )
        reaper.wait(END_SECONDS)
