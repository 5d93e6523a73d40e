"""What launchers leave in the environment of the processes they start: torchrun, Slurm's srun, mpirun of Open MPI and
of MPICH.

Everything here is a pure function of a mapping; ``library/join.py`` and ``cli`` pass it in. Each launcher sets the
rank and the number of processes; each gives the address of rank 0 in its own way, or not at all.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.errors import BadInput
from lockstep.transports.control.addresses import Address, AddressError, parse_address

Environment = Mapping[str, str]


LAUNCHED_VARIABLE = "LOCKSTEP_LAUNCHED"
"""Set for the tasks of a local cluster: the launcher shows the progress of their start, and ends them together."""

FIRST_PORT, LAST_PORT = 20000, 32000
"""Ports that are derived from a job's number lie here: below those that the system assigns to connections."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process among those that a launcher started; ``address`` is where rank 0 gathers them."""

    launcher: str
    rank: int
    world: int
    address: Address
    store: Address | None = None
    """The launcher's own store, if it runs one: the ranks meet there instead."""
    attempt: str = ""
    """Which start of the ranks this is, beside the same store."""
    again: bool = False
    """The launcher has started the whole job before: torchrun after a loss, Slurm after a requeue."""


def launched_by(environ: Environment, address: str | None = None, port: int | None = None) -> Launch | None:
    """Which launcher started this process, if any. BadInput if its variables make no sense.

    ``address``: where rank 0 is, if the script specifies it. ``port``: where it listens, if only that is known.
    """
    for launcher, rank, world, besides, find in _LAUNCHERS:
        if all(name in environ for name in (rank, world, *besides)):
            place = (_whole(environ, rank), _whole(environ, world))
            if not 0 <= place[0] < place[1]:
                raise BadInput(
                    f"{rank}={place[0]} is not below {world}={place[1]}; start the processes with {launcher}."
                )
            again = any(environ.get(name, "").strip().strip("0") for name in _STARTS)
            if address:
                return Launch(launcher, *place, _given(address), again=again)
            found = find(environ, place[1])
            store = None if port else _agent_store(environ)
            attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "")
            return Launch(launcher, *place, Address(found.host, port or found.port), store, attempt, again)
    return None


def worker_variables(environ: Environment, launcher: str, worker_hosts: Sequence[str], worker: int) -> dict[str, str]:
    """What the launcher's variables must hold in a worker of a job with servers: its number among the workers.

    Whoever reads them after ``lockstep.join()`` (torch.distributed, a framework, the program itself) counts processes
    that train. With the launcher's own numbers it would wait for those that serve, which never come.
    """
    hosts = [address.rpartition(":")[0] for address in worker_hosts]
    here = hosts[worker]
    numbers = (worker, len(hosts), hosts[:worker].count(here), hosts.count(here))
    return {name: str(number) for name, number in zip(_NUMBERS[launcher], numbers, strict=True) if name in environ}


def _whole(environ: Environment, name: str) -> int:
    text = environ[name].strip()
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise BadInput(f"the variable {name} should hold a number, but holds {environ[name]!r}; unset it.")
    return int(text)


def _given(address: str) -> Address:
    try:
        return parse_address(address)
    except AddressError as error:
        raise BadInput(f"lockstep.join(address=...): {error}") from None


def _master(environ: Environment) -> Address | None:
    """MASTER_ADDR and MASTER_PORT, as torchrun sets them and as people set them by hand. Port + 1, because torch itself
    uses the port."""
    if "MASTER_ADDR" not in environ or "MASTER_PORT" not in environ:
        return None
    return Address(environ["MASTER_ADDR"].strip(), _whole(environ, "MASTER_PORT") + 1)


def _agent_store(environ: Environment) -> Address | None:
    """The store that torchrun's agent runs for the ranks; without an agent, rank 0 would have to run it."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or "MASTER_ADDR" not in environ:
        return None
    return Address(environ["MASTER_ADDR"].strip(), _whole(environ, "MASTER_PORT"))


def _torchrun(environ: Environment, world: int) -> Address:  # noqa: ARG001 - all launchers have one signature
    found = _master(environ)
    if found is None:
        raise BadInput(
            "RANK and WORLD_SIZE are set without MASTER_ADDR and MASTER_PORT; start with torchrun, or set both."
        )
    return found


def _slurm(environ: Environment, world: int) -> Address:  # noqa: ARG001
    found = _master(environ)
    if found is not None:
        return found
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
    first = first_node(nodes)
    if first is None:
        raise BadInput(
            "Slurm's variables do not name the nodes of this step (SLURM_STEP_NODELIST is missing); start with srun, "
            "or give lockstep.join(address='HOST:PORT') the address of rank 0."
        )
    number = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return Address(first, _port_for(number))


def _open_mpi(environ: Environment, world: int) -> Address:
    found = _master(environ)
    if found is not None:
        return found
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "").strip() == str(world) and job:
        return Address("127.0.0.1", _port_for(job))
    raise BadInput(
        "mpirun does not give its processes the address of rank 0; add -x MASTER_ADDR=HOST -x MASTER_PORT=PORT to it, "
        "or give lockstep.join(address='HOST:PORT')."
    )


def _mpich(environ: Environment, world: int) -> Address:  # noqa: ARG001
    found = _master(environ)
    if found is None:
        raise BadInput(
            "mpirun does not give its processes the address of rank 0; add -genv MASTER_ADDR HOST -genv MASTER_PORT "
            "PORT to it, or give lockstep.join(address='HOST:PORT')."
        )
    return found


def _port_for(job: str) -> int:
    """The same for every process of a job, and most likely different for each job on a machine."""
    return FIRST_PORT + zlib.crc32(os.fsencode(job)) % (LAST_PORT - FIRST_PORT)


def first_node(nodes: str) -> str | None:
    """The first host of a list in Slurm's notation: ``gpu[03-07,12],login1`` gives gpu03."""
    match = re.match(r"([A-Za-z0-9_.-]+)(?:\[([0-9]+)[^\]]*\]([A-Za-z0-9_.-]*))?", nodes.strip())
    if match is None:
        return None
    stem, number, rest = match.groups()
    return stem if number is None else f"{stem}{number}{rest or ''}"


_STARTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

_LAUNCHERS: tuple[tuple[str, str, str, tuple[str, ...], Callable[[Environment, int], Address]], ...] = (
    ("torchrun", "RANK", "WORLD_SIZE", (), _torchrun),
    # Before Slurm: inside an allocation, mpirun has one process per node started by srun, and has their variables too.
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", (), _open_mpi),
    # A batch script has a rank as well, but belongs to no step.
    ("srun", "SLURM_PROCID", "SLURM_NTASKS", ("SLURM_STEP_ID",), _slurm),
    ("mpirun of MPICH", "PMI_RANK", "PMI_SIZE", (), _mpich),
)
"""Name, rank, number of processes, what must be there besides, and how rank 0 is found. The first that fits counts."""

_NUMBERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    "mpirun": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpirun of MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""By launcher: rank, processes, rank on its host, processes on its host."""
