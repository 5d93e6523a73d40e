"""What the doctor reports: one plain sentence with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class FindingKind(IntEnum):
    """What is wrong, the most likely cause first: findings are reported in this order."""

    FLAGS = 1
    WRONG_MACHINE = 2
    PORT_TAKEN = 3
    DUPLICATE = 4
    OLD_JOB = 5
    LOST_TASK = 6
    HOST_LISTS = 7
    NAME = 8
    WRONG_TASK = 9
    OTHER_KEY = 10
    OTHER_PROGRAM = 11
    NOTHING_LISTENS = 12
    NO_ANSWER = 13
    OTHER_PORTS = 14
    VERSION = 15
    SETTING = 16
    GPU = 17
    LIMIT = 18
    FOLDER = 19
    RDMA = 20
    DATA = 21
    CLOCK = 22
    MTU = 23
    PROXY = 24
    REMARK = 25

    @property
    def code(self) -> str:
        """``host-lists``, for programs that read the JSON output."""
        return self.name.lower().replace("_", "-")


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """``keeps_from_working``: the job cannot run like this; otherwise it is only worth knowing."""

    kind: FindingKind
    sentence: str
    keeps_from_working: bool = True


def in_order(findings: list[DoctorFinding]) -> list[DoctorFinding]:
    """Each once; what keeps the job from working comes first, and there the most likely cause."""
    unique = dict.fromkeys(findings)
    return sorted(unique, key=lambda finding: (not finding.keeps_from_working, finding.kind))
