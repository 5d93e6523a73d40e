"""What an engine gets wrong: names, ports, packets; and how to ask each engine for what is missing. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.doctor.facts import ClusterFacts, NameFact
from lockstep.doctor.finding import DoctorFinding, FindingKind
from lockstep.doctor.place import CLUSTER_NAME, ClusterEngine
from lockstep.protocol.core.ids import TaskId
from lockstep.protocol.core.reach import Reach

_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class GrantRemedies:
    """How to get more of something; each continues a sentence after a semicolon."""

    memory: str = "raise its limit, or use a smaller model"
    shared_memory: str = "enlarge it (mount -o remount,size=...; in a container: --shm-size)"
    locked_memory: str = "run 'ulimit -l unlimited' (in a container: --ulimit memlock=-1)"
    processes: str = "raise its limit, pids.max"
    gpus: str = ""
    """Empty: nothing but what the machine shows."""


GRANTS = {
    ClusterEngine.NONE: GrantRemedies(),
    ClusterEngine.POD: GrantRemedies(
        memory="raise resources.limits.memory of the container, or use a smaller model",
        shared_memory="mount an emptyDir with medium: Memory at /dev/shm (a pod has 64 MiB otherwise)",
        locked_memory="raise LimitMEMLOCK of the node's container runtime: a pod cannot ask for it itself",
        processes="raise podPidsLimit of the node's kubelet",
        gpus="ask for them in resources.limits of the container (nvidia.com/gpu)",
    ),
    ClusterEngine.SLURM: GrantRemedies(
        memory="ask for more with --mem, or use a smaller model",
        locked_memory="set LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK",
        gpus="ask for them with --gpus-per-task or --gres",
    ),
    ClusterEngine.RAY: GrantRemedies(
        memory="give the actor and its node more memory, or use a smaller model",
        gpus="give the actor num_gpus: Ray hides all GPUs from one that asks for none",
    ),
}


def engine_findings(case: ClusterFacts) -> Iterator[DoctorFinding]:
    """What is known about the engine of this task, besides what is true of any machine."""
    yield from _packets(case)
    if case.shared.place.engine is ClusterEngine.POD:
        yield from _names(case)
        yield from _own_name(case)
        yield from _policies(case)


def _short(task: str) -> str:
    return TaskId.parse(task).short


def _names(case: ClusterFacts) -> Iterator[DoctorFinding]:
    lost = [fact for fact in case.names if fact.problem]
    if not lost:
        return
    if case.shared.place.cluster_dns is False:
        yield DoctorFinding(
            FindingKind.NAME,
            f"no name resolves in this pod, not even {CLUSTER_NAME}: the cluster's DNS is not ready, or a "
            "NetworkPolicy keeps this pod from it; look at the pods of kube-dns in kube-system, and allow port 53.",
        )
    elif len(lost) == len(case.names):
        yield DoctorFinding(
            FindingKind.NAME,
            f"none of the names in the host lists resolves ({_list(lost)}), although the cluster's DNS answers: the "
            "headless service of the job is missing, or its pods are not named after it; 'kubectl get services' must "
            "show it with CLUSTER-IP None (JobSet: network.enableDNSHostnames).",
        )
    else:
        yield DoctorFinding(
            FindingKind.NAME,
            f"{_list(lost)} does not resolve yet: that pod has no address, or is not ready and its service does not "
            "publish addresses before that (publishNotReadyAddresses); look at it with 'kubectl describe pod'.",
        )


def _list(lost: list[NameFact]) -> str:
    shown = " and ".join(f"{fact.name} of {_short(fact.task)}" for fact in lost[:_MOST_NAMES])
    return shown if len(lost) <= _MOST_NAMES else f"{shown} and {len(lost) - _MOST_NAMES} more"


def _own_name(case: ClusterFacts) -> Iterator[DoctorFinding]:
    own = {start.task for start in case.own}
    here = set(case.shared.place.addresses)
    for fact in case.names:
        if fact.task in own and fact.addresses and here and here.isdisjoint(fact.addresses):
            yield DoctorFinding(
                FindingKind.NAME,
                f"{fact.name}, the name of {_short(fact.task)}, leads to {fact.addresses[0]} and not to this pod: the "
                "DNS still has a former pod (it forgets it within its TTL), or the service is not headless; give it "
                "clusterIP: None.",
                False,
            )


def _policies(case: ClusterFacts) -> Iterator[DoctorFinding]:
    closed = [visit for visit in case.visits if visit.answer is Reach.SILENT or visit.other_port]
    if closed:
        yield DoctorFinding(
            FindingKind.OTHER_PORTS,
            f"packets to {_short(closed[0].host)} are dropped: if its pod runs, a NetworkPolicy keeps them out; allow "
            "all TCP ports between the pods of the job, as 'lockstep manifest kubernetes' does, or those of --ports.",
            False,
        )


def _packets(case: ClusterFacts) -> Iterator[DoctorFinding]:
    """Large packets between networks of different sizes may vanish, while small ones, the handshakes, arrive."""
    mine = case.shared.place.mtu
    for report in case.reports:
        theirs = 0 if report.shared is None else report.shared.place.mtu
        if mine and theirs and mine != theirs:
            yield DoctorFinding(
                FindingKind.MTU,
                f"the network here takes packets of {mine} bytes (MTU), that of {_short(report.task)} on {report.host} "
                f"{theirs}: large packets between them may get lost without a word; set the same MTU on all nodes (in "
                "Kubernetes, in the network plugin).",
                False,
            )
            return
