"""Writes a script for sbatch. Servers are a part of the job of their own, so that they can run on nodes without GPUs.

After the script is asked to end (preempted, or near its time limit), the job saves a checkpoint and the script puts
itself back into the queue; the job then goes on from there (docs/slurm.md).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Iterator

from lockstep.cli.flags.parsing import read_command_line
from lockstep.cli.flags.table import TABLE
from lockstep.cli.run import RESTARTS
from lockstep.errors import BadInput
from lockstep.protocol.core.timing import GRACE_SECONDS, STOP_SECONDS
from lockstep.security.chosen import INSECURE_VARIABLE, is_insecure
from lockstep.security.key import KEY_VARIABLE

EXAMPLE = "lockstep manifest slurm --servers=1 --workers=2 -- lockstep bench --train_dir=run1 > job.sh"

AHEAD_SECONDS = 30
"""How much longer than the grace before the time limit the signal is sent: Slurm looks at the clock now and then."""

_ASKED_TO_END = 143


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--servers", type=int, default=0, metavar="N", help="parameter servers (default: 0: every rank trains)")
    add("--workers", type=int, required=True, metavar="N", help="workers")
    add("--name", default="lockstep", help="the job's name (default: lockstep)")
    add("--time", default="", metavar="D-HH:MM:SS", help="time limit (default: the partition's)")
    add("--partition", default="", help="where workers run (default: Slurm's)")
    add("--server_partition", default="", metavar="PARTITION", help="where servers run (default: that of the workers)")
    add("--cpus_per_worker", type=int, default=1, metavar="N", help="cores of each worker (default: 1)")
    add("--cpus_per_server", type=int, default=1, metavar="N", help="cores of each server (default: 1)")
    add("--gpus_per_worker", type=int, default=0, metavar="N", help="GPUs of each worker (default: 0)")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="any other option of sbatch, for all nodes")
    add("--grace", type=int, default=int(GRACE_SECONDS), metavar="SECONDS", help="time to save a checkpoint (25)")
    add("--restarts", type=int, default=RESTARTS, metavar="N", help="how often a lost task is started again (3)")


def write(args: argparse.Namespace) -> str:
    """The script. BadInput if it would not run."""
    problems = list(_problems(args))
    if problems:
        raise BadInput(problems)
    return "\n".join([*_head(args), "", *_body(args)]) + "\n"


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if args.workers < 1:
        yield f"--workers={args.workers} leaves none to train; give 1 or more."
    if args.cpus_per_worker < 1 or args.cpus_per_server < 1:
        yield "--cpus_per_worker and --cpus_per_server must be 1 or more."
    for name in ("servers", "gpus_per_worker", "restarts"):
        if getattr(args, name) < 0:
            yield f"--{name}={getattr(args, name)} is negative; give 0 or more."
    if args.grace < 1:
        yield f"--grace={args.grace} leaves no time; give 1 or more seconds."
    if args.server_partition and not args.servers:
        yield "--server_partition has no effect without servers; add --servers=1, or leave it out."
    words = (args.name, args.time, args.partition, args.server_partition)
    if any(not re.fullmatch(r"[A-Za-z0-9_.,:+-]*", word) for word in words):
        yield "--name, --time and the partitions may have letters, digits and - _ . : + only."
    for option in args.sbatch:
        if not re.fullmatch(r"--[a-z][^\n#]*", option):
            yield f"--sbatch={option!r} is not an option; write, for example, --sbatch=--account=physics."
    yield from _program_problems(args)


def _program_problems(args: argparse.Namespace) -> Iterator[str]:
    if any("\n" in word for word in args.program):
        yield "the program's words have a line break, which a script cannot have there; take it out."
    if not _is_bench(args.program):
        return
    line = read_command_line(args.program[2:], TABLE)
    yield from line.mistakes
    for name in ("job_name", "task_index", "ps_hosts", "worker_hosts", "ps", "workers"):
        if name in line.given:
            yield f"--{name} is found out when the job runs; leave it out, and give manifest --servers and --workers."
    if not line.value("train_dir"):
        yield "a job that is put back into the queue goes on from its checkpoint; add --train_dir=FOLDER to the bench."


def _is_bench(program: tuple[str, ...]) -> bool:
    return len(program) > 1 and os.path.basename(program[0]) == "lockstep" and program[1] == "bench"


# -- the script --


def _head(args: argparse.Namespace) -> Iterator[str]:
    yield "#!/bin/bash"
    yield "# Written by lockstep manifest slurm; start it with sbatch. docs/slurm.md explains it."
    yield f"#SBATCH --job-name={args.name}"
    yield "#SBATCH --output=%x-%j.log"
    yield "#SBATCH --open-mode=append"
    if args.servers:
        yield from _part(args, args.servers, args.cpus_per_server, 0, args.server_partition or args.partition)
        yield "#SBATCH hetjob"
    yield from _part(args, args.workers, args.cpus_per_worker, args.gpus_per_worker, args.partition)


def _part(args: argparse.Namespace, tasks: int, cpus: int, gpus: int, partition: str) -> Iterator[str]:
    """One part of the job; nothing is inherited from the part before."""
    yield f"#SBATCH --ntasks={tasks} --cpus-per-task={cpus}"
    if gpus:
        yield f"#SBATCH --gpus-per-task={gpus}"
    if partition:
        yield f"#SBATCH --partition={partition}"
    if args.time:
        yield f"#SBATCH --time={args.time}"
    yield "#SBATCH --requeue"
    yield f"#SBATCH --signal=TERM@{int(args.grace + 2 * STOP_SECONDS + AHEAD_SECONDS)}"
    for option in args.sbatch:
        yield f"#SBATCH {option}"


def _body(args: argparse.Namespace) -> Iterator[str]:
    if os.environ.get(KEY_VARIABLE):
        yield f"export {KEY_VARIABLE}={shlex.quote(os.environ[KEY_VARIABLE])}"
    if is_insecure():
        yield f"export {INSECURE_VARIABLE}=1"
    program = [*args.program]
    if _is_bench(args.program):
        added = {"ps": args.servers, "workers": args.workers, "grace": args.grace}
        given = read_command_line(args.program[2:], TABLE).given
        program += [
            f"--{name}={value}" for name, value in added.items() if name not in given and (value or name != "ps")
        ]
    else:
        wanted = f"servers={args.servers}, grace={args.grace}" if args.servers else f"grace={args.grace}"
        yield f"# The program calls lockstep.join({wanted}, train_dir=...)."
    yield f"run=({shlex.join(['lockstep', 'run', f'--restarts={args.restarts}', '--', *program])})"
    yield ""
    yield "# A task that fails does not end the others at once: the job itself ends them, and says why."
    yield f"srun --kill-on-bad-exit=0 {' : '.join(_steps(args))}"
    yield "code=$?"
    yield ""
    yield "# Asked to end, the job has saved a checkpoint. After scancel the script does not come this far."
    yield f'if [ "$code" = {_ASKED_TO_END} ]; then'
    yield '  echo "asked to end: back into the queue, to go on from the newest checkpoint"'
    yield '  scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "$code"'


def _steps(args: argparse.Namespace) -> Iterator[str]:
    """The parts of the step. srun asks for its cores itself: since Slurm 22.05 it does not take them from sbatch."""
    if args.servers:
        yield f'--het-group=0 --ntasks={args.servers} --cpus-per-task={args.cpus_per_server} "${{run[@]}}"'
    gpus = f" --gpus-per-task={args.gpus_per_worker}" if args.gpus_per_worker else ""
    group = "--het-group=1 " if args.servers else ""
    yield f'{group}--ntasks={args.workers} --cpus-per-task={args.cpus_per_worker}{gpus} "${{run[@]}}"'
