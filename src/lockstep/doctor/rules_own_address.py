"""What it means that another process answers at the address of the task that this doctor examines. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.doctor.facts import DOCTOR_PHASE, OwnPort, Visit
from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.protocol.core.ids import TaskId
from lockstep.runtime.startup.start_facts import StartFacts, list_difference, setting_differences


@dataclass(frozen=True, slots=True)
class OwnAddress:
    """The conclusion; ``start`` is what to compare with others from now on."""

    port: OwnPort
    start: StartFacts
    remarks: tuple[DoctorFinding, ...] = ()


def judge_own_address(
    port: OwnPort, visit: Visit, listening: bool, ours: StartFacts, told: StartFacts | None
) -> OwnAddress:
    """``visit`` found another process than this doctor there; ``listening``: this doctor listens too, somewhere.

    ``told`` is what the process that answers was started with.
    """
    if port.kind is FindingKind.WRONG_MACHINE or not visit.reached:
        return OwnAddress(port, ours)
    if listening or visit.phase == DOCTOR_PHASE:
        return OwnAddress(_duplicate(port, visit), ours)
    who = TaskId.parse(port.task).short
    remark = DoctorFinding(
        FindingKind.REMARK,
        f"{who} is already running here ({visit.phase} for {visit.phase_seconds:.0f} s, {visit.process}); the doctor "
        "queried it and did not listen at its address.",
        False,
    )
    if told is None:
        return OwnAddress(replace(port, problem="", running=True), ours, (remark,))
    difference = _difference(ours, told)
    if not difference:
        return OwnAddress(replace(port, problem="", running=True), told, (remark,))
    problem = (
        f"{who} is already running here as {visit.process}, but with different flags: {difference}; end that "
        "process if it belongs to an earlier job."
    )
    return OwnAddress(replace(port, problem=problem, kind=FindingKind.OLD_JOB, running=True), told)


def _duplicate(port: OwnPort, visit: Visit) -> OwnPort:
    who = TaskId.parse(port.task).short
    problem = (
        f"{who} is already running at {port.address} as {visit.process}: two processes were started with the same "
        "--job_name and --task_index; give this one its own index."
    )
    return replace(port, problem=problem, kind=FindingKind.DUPLICATE)


def _difference(ours: StartFacts, told: StartFacts) -> str:
    if list_difference(ours, told) is not None:
        return "its host lists differ"
    if not ours.settings or not told.settings:
        return ""
    for name, mine, theirs in setting_differences(ours, told):
        return f"it has {name}={theirs}, this command line has {name}={mine}"
    return ""
