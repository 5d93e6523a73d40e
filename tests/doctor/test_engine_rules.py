"""Where the doctor runs, and what it says about that engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from lockstep.doctor.analysis import analyse
from lockstep.doctor.facts import ClusterFacts, NameFact, PeerReport, Shared, Visit
from lockstep.doctor.finding import FindingKind
from lockstep.doctor.machine import MachineFacts
from lockstep.doctor.needs import needs_of
from lockstep.doctor.place import ClusterEngine, Place, engine_of, look_at_place
from lockstep.doctor.rules_machine import MachineRequirements, machine_findings
from lockstep.protocol.core.ids import Role, server, worker
from lockstep.protocol.core.reach import Reach
from lockstep.runtime.startup.start_facts import StartFacts
from lockstep.transports.control.addresses import main_address

GIB = 1 << 30
OWN = StartFacts(str(worker(0)), ("j-ps-0:1",), ("j-worker-0:1",), "1.0", ())
POD = Place(ClusterEngine.POD, cluster_dns=True, addresses=("10.0.0.1", "127.0.0.1"), mtu=1450)


def name(task: object, problem: str = "", *addresses: str) -> NameFact:
    return NameFact(str(task), f"j-{task}".replace("/", ""), addresses, problem)


def case(place: Place = POD, **known: object) -> ClusterFacts:
    return dataclasses.replace(ClusterFacts(own=(OWN,), protocol="auto", shared=Shared(place=place)), **known)  # type: ignore[arg-type]


def findings(facts: ClusterFacts) -> list[tuple[FindingKind, bool, str]]:
    return [(one.kind, one.keeps_from_working, one.sentence) for one in analyse(facts)]


@pytest.mark.parametrize(
    ("environ", "engine"),
    [
        ({}, ClusterEngine.NONE),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, ClusterEngine.POD),
        ({"SLURM_JOB_ID": "1"}, ClusterEngine.NONE),  # a batch script or an allocation: no step
        ({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1"}, ClusterEngine.SLURM),
        ({"RAY_RAYLET_PID": "7", "KUBERNETES_SERVICE_HOST": "10.96.0.1"}, ClusterEngine.RAY),
    ],
)
def test_the_variables_tell_the_engine(environ: dict[str, str], engine: ClusterEngine) -> None:
    assert engine_of(environ) is engine


def test_looking_at_this_place() -> None:
    found = look_at_place(ClusterEngine.NONE)
    assert found.cluster_dns is None
    assert main_address() in found.addresses
    assert found.mtu >= 576
    assert look_at_place(ClusterEngine.NONE, Path("/nowhere")).mtu == 0


def test_a_healthy_pod() -> None:
    names = (name(server(0), "", "10.0.0.2"), name(worker(0), "", "10.0.0.1"))
    assert findings(case(names=names)) == []


def test_dns_is_not_ready() -> None:
    place = dataclasses.replace(POD, cluster_dns=False)
    ((kind, keeps, sentence),) = findings(case(place, names=(name(server(0), "no answer"), name(worker(0), "x"))))
    assert (kind, keeps) == (FindingKind.NAME, True)
    assert "DNS is not ready" in sentence


def test_the_headless_service_is_missing() -> None:
    ((kind, keeps, sentence),) = findings(case(names=(name(server(0), "unknown"), name(worker(0), "unknown"))))
    assert (kind, keeps) == (FindingKind.NAME, True)
    assert "headless service of the job is missing" in sentence
    assert "of ps 0 and" in sentence


def test_one_pod_has_no_name_yet() -> None:
    names = (name(server(0), "unknown"), name(worker(0), "", "10.0.0.1"))
    ((_, keeps, sentence),) = findings(case(names=names))
    assert keeps
    assert "does not resolve yet" in sentence
    assert "publishNotReadyAddresses" in sentence


def test_the_own_name_leads_elsewhere() -> None:
    names = (name(server(0), "", "10.0.0.2"), name(worker(0), "", "10.0.0.77"))
    ((_, keeps, sentence),) = findings(case(names=names))
    assert not keeps
    assert "leads to 10.0.0.77 and not to this pod" in sentence


@pytest.mark.parametrize("change", [{"answer": Reach.SILENT}, {"other_port": "10.0.0.2:4000 did not answer"}])
def test_a_network_policy_closes_ports(change: dict[str, object]) -> None:
    seen = Visit(str(worker(0)), str(server(0)), "10.0.0.2:1", Reach.LOCKSTEP, task=str(server(0)))
    visit = dataclasses.replace(seen, **change)  # type: ignore[arg-type]
    told = findings(case(visits=(visit,)))
    assert any("NetworkPolicy" in sentence for _, _, sentence in told)
    elsewhere = findings(case(Place(), visits=(visit,)))
    assert len(elsewhere) == len(told) - 1
    assert not any("NetworkPolicy" in sentence for _, _, sentence in elsewhere)


@pytest.mark.parametrize("engine", list(ClusterEngine))
def test_packets_of_different_sizes(engine: ClusterEngine) -> None:
    place = dataclasses.replace(POD, engine=engine)
    report = PeerReport(str(server(0)), "node-2", True, shared=Shared(place=Place(mtu=1500)))
    ((kind, keeps, sentence),) = findings(case(place, reports=(report,)))
    assert (kind, keeps) == (FindingKind.MTU, False)
    assert "takes packets of 1450 bytes (MTU), that of ps 0 on node-2 1500" in sentence
    unknown = dataclasses.replace(report, shared=Shared())
    assert findings(case(place, reports=(unknown,))) == []


@pytest.mark.parametrize(
    ("engine", "facts", "remedy"),
    [
        (ClusterEngine.POD, {"memory_limit": 1 << 20}, "raise resources.limits.memory"),
        (ClusterEngine.POD, {"shm_free": 1 << 20}, "emptyDir with medium: Memory at /dev/shm"),
        (ClusterEngine.POD, {"locked_memory": 1 << 16}, "LimitMEMLOCK of the node's container runtime"),
        (ClusterEngine.POD, {"gpus_present": 0}, "nvidia.com/gpu"),
        (ClusterEngine.POD, {"tasks_left": 3}, "podPidsLimit"),
        (ClusterEngine.SLURM, {"memory_limit": 1 << 20}, "with --mem"),
        (ClusterEngine.SLURM, {"locked_memory": 1 << 16}, "PropagateResourceLimitsExcept=MEMLOCK"),
        (ClusterEngine.SLURM, {"gpus_present": 0}, "--gpus-per-task"),
        (ClusterEngine.RAY, {"gpus_present": 2, "gpus_visible": 0}, "num_gpus"),
        (ClusterEngine.NONE, {"memory_limit": 1 << 20}, "raise its limit"),
    ],
)
def test_each_engine_grants_what_is_missing_in_its_own_way(
    engine: ClusterEngine, facts: dict[str, int], remedy: str
) -> None:
    plenty = MachineFacts(open_files=65536, shm_free=64 * GIB, cpus=8, torch="2.13.0", gpus_present=1, gpus_visible=1)
    plenty = dataclasses.replace(plenty, torch_cuda="12.6")
    lacking = dataclasses.replace(plenty, **{"gpus_visible": facts.get("gpus_present", 1), **facts})  # type: ignore[arg-type]
    protocol = {"shm_free": "grpc+shm", "locked_memory": "grpc+ucx"}.get(next(iter(facts)), "grpc")
    asked = MachineRequirements(protocol=protocol, device="gpu", engine=engine)
    (found,) = machine_findings(lacking, asked, needs_of((Role.WORKER,), 1, 2, "resnet50", "imagenet"))
    assert remedy in found.sentence
