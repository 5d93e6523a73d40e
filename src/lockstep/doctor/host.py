"""Checks this machine: limits, GPUs, torch, folders, RDMA."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.doctor.facts import Shared
from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.machine import look_at_data, look_at_machine
from lockstep.doctor.needs import Needs, needs_of
from lockstep.doctor.place import ClusterEngine, look_at_place
from lockstep.doctor.rules_machine import VERBS, MachineRequirements, limit_findings, machine_findings, rdma_findings
from lockstep.protocol.core.ids import CHIEF, ClusterShape, Role, TaskId
from lockstep.runtime.startup.preflight import folder_problems
from lockstep.transports.verbs.devices import look_for_rdma
from lockstep.transports.verbs.options import NO_OPTIONS, RdmaOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequirements:
    """What the command line requires of the machines."""

    shape: ClusterShape
    protocol: str
    device: str = "auto"
    num_gpus: int = 1
    model: str = ""
    data_name: str = ""
    train_dir: str | None = None
    data_dir: str | None = None
    rdma: RdmaOptions = NO_OPTIONS
    visible_gpus: str | None = None
    """The value of CUDA_VISIBLE_DEVICES."""
    engine: ClusterEngine = ClusterEngine.NONE
    """What has started the task, by its variables."""


def look_at_host(job: JobRequirements, tasks: tuple[TaskId, ...]) -> Shared:
    """All checks of this machine, for the tasks that run on it."""
    asked, train_dir = _asked(job, tasks)
    facts = look_at_machine(job.visible_gpus, train_dir)
    findings = machine_findings(facts, asked, _needs(job, tasks))
    if train_dir is not None:
        findings += [
            DoctorFinding(FindingKind.FOLDER, sentence) for sentence in folder_problems("train_dir", train_dir)
        ]
    rdma = look_for_rdma()
    findings += rdma_findings(rdma, job.protocol, job.rdma)
    data = look_at_data(job.data_dir) if job.data_dir is not None and asked.trains else None
    if data is not None and data.problem:
        sentence = f"--data_dir={data.path} cannot be read ({data.problem}); give the folder that holds the data set."
        findings.append(DoctorFinding(FindingKind.DATA, sentence))
    ports = rdma.ports if job.protocol == VERBS else ()
    return Shared(ports, data, tuple(findings), look_at_place(job.engine))


def look_at_limits(job: JobRequirements, tasks: tuple[TaskId, ...]) -> list[DoctorFinding]:
    """The checks that take no time, for every start."""
    asked, train_dir = _asked(job, tasks)
    return limit_findings(look_at_machine(job.visible_gpus, train_dir, quick=True), asked, _needs(job, tasks))


def _asked(job: JobRequirements, tasks: tuple[TaskId, ...]) -> tuple[MachineRequirements, str | None]:
    # Only the chief writes files; the same command line may run on machines that do not have its folder.
    train_dir = job.train_dir if not tasks or CHIEF in tasks else None
    asked = MachineRequirements(
        protocol=job.protocol,
        device=job.device,
        num_gpus=job.num_gpus,
        trains=not tasks or any(task.role is Role.WORKER for task in tasks),
        tasks=max(len(tasks), 1),
        train_dir=train_dir,
        engine=job.engine,
    )
    return asked, train_dir


def _needs(job: JobRequirements, tasks: tuple[TaskId, ...]) -> Needs:
    roles = tuple(task.role for task in tasks) or (Role.WORKER,)
    return needs_of(roles, job.shape.servers, job.shape.workers, job.model, job.data_name)
