"""Debian's Slurm on this host: a controller and two nodes, which listen on loopback only, with munge between them."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import lockstep
from engines.parts import SBIN, find
from helpers.ports import free_port
from helpers.programs import Finished, Program
from helpers.waiting import wait_until
from lockstep.runtime.processes import descendants

PACKAGES = ("slurm-wlm", "munge")
NODES = ("127.0.0.1", "127.0.0.2")
"""Their names: addresses, because every node must find the first one by its name."""
SECONDS = 120.0
_PAUSE = threading.Event()

_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
# The job's old credential must have expired before it is started again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
KillWait=30
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=work Nodes=ALL Default=YES PriorityTier=1 MaxTime=60 PreemptMode=REQUEUE GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=60 PreemptMode=OFF
"""


class Slurm:
    """Running daemons, and the commands to use them. ``close`` ends every job and every daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        host = socket.gethostname().partition(".")[0]
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (folder / "state").mkdir()
        text = _CONFIGURATION.format(host=host, port=free_port(), user=getpass.getuser(), folder=folder)
        for name in NODES:
            text += (
                f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=4 RealMemory=1000\n"
            )
        configuration = folder / "slurm.conf"
        configuration.write_text(text)
        self.environment = {
            "SLURM_CONF": str(configuration),
            "PATH": f"{self._commands()}:{os.environ['PATH']}:{SBIN}",
            "PYTHONPATH": str(Path(lockstep.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        }
        munge = {"socket": folder / "munge.socket"}
        munge |= {f"{name}-file": folder / f"munge.{name}" for name in ("key", "pid", "seed", "log")}
        self._daemons: list[Program] = []
        self._start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in munge.items()))
        wait_until(munge["socket"].exists, SECONDS, "munge's socket")
        self._start("slurmctld", "-D", "-i")
        for name in NODES:
            self._start("slurmd", "-D", "-N", name)

    def _commands(self) -> Path:
        """A folder with the ``lockstep`` command of this tree."""
        commands = self.folder / "bin"
        commands.mkdir()
        command = commands / "lockstep"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep "$@"\n')
        command.chmod(0o755)
        return commands

    def _start(self, program: str, *words: str) -> None:
        found = find(program)
        assert found is not None
        self._daemons.append(Program((found, *words), self.environment))

    def wait_until_idle(self) -> None:
        """Both nodes have no work, and nothing of former work is left."""
        wait_until(lambda: self.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == "2", SECONDS, self._said())
        wait_until(self._no_step, SECONDS, "the end of all steps")

    def _said(self) -> str:
        return "two idle nodes; the daemons said: " + "".join(daemon.stderr()[-2000:] for daemon in self._daemons)

    def _no_step(self) -> bool:
        """Whether every step's keeper is gone. They are nobody's children, so they end as ours."""
        left = [facts for facts in descendants(os.getpid()) if "slurmstepd" in facts.name]
        for facts in left:
            if facts.parent == os.getpid():
                os.waitpid(facts.pid, os.WNOHANG)
        _PAUSE.wait(0.05)
        return not left

    # -- commands --

    def ask(self, *words: str) -> str:
        """What a command of Slurm answers; empty if it fails. Not at once: many ask until something has come."""
        _PAUSE.wait(0.1)
        environment = {**os.environ, **self.environment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=SECONDS, cwd=self.folder)
        return done.stdout.strip() if done.returncode == 0 else ""

    def run(self, *words: str, seconds: float = 400.0) -> Finished:
        """A command such as srun, to its end."""
        with self.started(*words) as program:
            return program.wait(seconds)

    def started(self, *words: str) -> Program:
        """A command such as srun, running; use it in a ``with`` block."""
        return Program(words, self.environment)

    def submit(self, script: str, *options: str) -> str:
        """The number of a job that sbatch takes."""
        file = self.folder / "job.sh"
        file.write_text(script)
        return self.ask("sbatch", "--parsable", *options, str(file))

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, of its first part if it has several."""
        first = self.ask("scontrol", "show", "job", number).split("\n\n")[0]
        return dict(re.findall(r"(\w+)=(\S*)", first))

    def wait_for(self, number: str, state: str, seconds: float = 400.0) -> dict[str, str]:
        """Wait until the job is in this state."""
        known: dict[str, str] = {}

        def there() -> bool:
            known.update(self.job(number))
            return known.get("JobState") == state

        try:
            wait_until(there, seconds, f"job {number} is {state}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {known}") from None
        return known

    def cancel_all(self) -> None:
        self.ask("scancel", "--me")
        self.wait_until_idle()

    def close(self) -> None:
        self.ask("scancel", "--me")
        wait_until(lambda: not self.ask("squeue", "-h"), SECONDS, "the end of all jobs")
        wait_until(self._no_step, SECONDS, "the end of all steps")
        for daemon in reversed(self._daemons):
            daemon.signal(signal.SIGTERM)
            daemon.wait(SECONDS)
            daemon.close()


def manifest(slurm: Slurm, words: Sequence[str], program: Sequence[str]) -> str:
    """What ``lockstep manifest slurm`` writes."""
    done = slurm.run("lockstep", "manifest", "slurm", *words, "--", *program)
    assert done.code == 0, done
    return done.stdout
