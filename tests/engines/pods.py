"""Pods of a manifest on this machine: what the kubelet, the operators and the DNS of a cluster would do, in small.

Everything comes from the manifest that the command wrote: commands, variables, mounts, users, probes, names, and which
exit codes bring a pod back. Each container runs in a network namespace of its own, with its own name, its own mounts
and nothing of this process's environment. Names are in the hosts files of all pods, from when a cluster's DNS would
have them: at once where addresses are published before a pod is ready, else when its startup probe has passed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from helpers import namespaces
from helpers.programs import Finished, Program
from lockstep.runtime import host_network

ROOT = Path(__file__).parents[2]
NAMESPACE = "team"
_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
_PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "mount": "mount"}


def why_not() -> str:
    """Why pods cannot be run here; empty if they can."""
    return host_network.why_not({**host_network.PROGRAMS, **_PROGRAMS})


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod that an operator makes of the manifest."""

    hostname: str
    names: tuple[str, ...]
    """Under which the DNS of the cluster knows it."""
    template: dict[str, Any]
    given: dict[str, str]
    """What the operator adds to the variables of its container."""
    annotations: dict[str, str]
    published_early: bool
    """Whether its name is known before it is ready."""
    final_codes: frozenset[int]
    """Exit codes after which no pod takes its place."""

    @property
    def container(self) -> dict[str, Any]:
        (found,) = self.template["spec"]["containers"]
        return dict(found)

    def comes_back(self, code: int) -> bool:
        return code != 0 and code not in self.final_codes


def planned(objects: Sequence[dict[str, Any]]) -> dict[str, PodPlan]:
    """The pods of the job, by role and number: ``worker-1``."""
    job = objects[-1]
    return dict(_of_jobset(job) if job["kind"] == "JobSet" else _of_tfjob(job))


def _of_jobset(job: dict[str, Any]) -> list[tuple[str, PodPlan]]:
    network, found = job["spec"]["network"], []
    assert network["enableDNSHostnames"]
    for replicated in job["spec"]["replicatedJobs"]:
        spec = replicated["template"]["spec"]
        assert (spec["completionMode"], replicated["replicas"]) == ("Indexed", 1)
        assert spec["template"]["spec"]["restartPolicy"] == "Never"  # or Kubernetes refuses the policy
        codes = [
            code
            for rule in spec["podFailurePolicy"]["rules"]
            if rule["action"] == "FailJob" and rule["onExitCodes"]["operator"] == "In"
            for code in rule["onExitCodes"]["values"]
        ]
        for index in range(spec["completions"]):
            hostname = f"{job['metadata']['name']}-{replicated['name']}-0-{index}"
            plan = PodPlan(
                hostname,
                (f"{hostname}.{network['subdomain']}",),
                spec["template"],
                {"JOB_COMPLETION_INDEX": str(index)},
                {_INDEX_ANNOTATION: str(index)},
                network["publishNotReadyAddresses"],
                frozenset(codes),
            )
            found.append((f"{replicated['name']}-{index}", plan))
    return found


def _of_tfjob(job: dict[str, Any]) -> list[tuple[str, PodPlan]]:
    """As Kubeflow's operator 1.9 writes TF_CONFIG and names services."""
    name, replicas = job["metadata"]["name"], job["spec"]["tfReplicaSpecs"]
    cluster: dict[str, list[str]] = {}
    for kind, one in replicas.items():
        (container,) = [each for each in one["template"]["spec"]["containers"] if each["name"] == "tensorflow"]
        (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "tfjob-port"]
        names = [f"{name}-{kind.lower()}-{index}.{NAMESPACE}.svc" for index in range(one["replicas"])]
        cluster[kind.lower()] = [f"{each}:{port}" for each in names]
    found = []
    for kind, one in replicas.items():
        assert one["restartPolicy"] == "ExitCode"
        for index in range(one["replicas"]):
            role, hostname = kind.lower(), f"{name}-{kind.lower()}-{index}"
            said = {"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"}
            given = {"TF_CONFIG": json.dumps(said)}
            plan = PodPlan(
                hostname, (f"{hostname}.{NAMESPACE}.svc",), one["template"], given, {}, False, frozenset(range(1, 128))
            )
            found.append((f"{role}-{index}", plan))
    return found


def variables_of(plan: PodPlan) -> dict[str, str]:
    """The container's variables as the kubelet makes them: in order, with references to earlier ones."""
    known: dict[str, str] = {}
    for one in plan.container["env"]:
        if "value" in one:
            known[one["name"]] = re.sub(r"\$\((\w+)\)", lambda found: known.get(found[1], found[0]), one["value"])
        else:
            path = one["valueFrom"]["fieldRef"]["fieldPath"]
            found = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
            assert found is not None, path
            known[one["name"]] = plan.annotations[found[1]]
    return {**plan.given, **known}


def command_of(plan: PodPlan) -> list[str]:
    return [word.replace("$$(", "$(") for word in plan.container["command"]]


class Pods:
    """The pods of one manifest; use it in a ``with`` block. Each start of a pod takes a place that nobody has had."""

    def __init__(self, objects: Sequence[dict[str, Any]], spares: int = 0) -> None:
        self.plans = planned(objects)
        self._secrets = {one["metadata"]["name"]: one["stringData"] for one in objects if one["kind"] == "Secret"}
        places = {f"p{n}": [f"10.44.0.{10 + n}/24"] for n in range(len(self.plans) + spares)}
        self._network = namespaces.Network(places)
        self._free = list(places)
        self._addresses = {place: addresses[0].partition("/")[0] for place, addresses in places.items()}
        self._places: dict[str, str] = {}
        self._published: dict[str, str] = {}
        self._running: dict[str, Program] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-pods-", dir="/var/tmp"))
        self.claim = self.folder / "claim"

    def __enter__(self) -> Self:
        self._make_image()
        self._network.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._running.values():
            program.close()
        self._network.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _make_image(self) -> None:
        """A folder for PATH, as the image would have it; it runs the Python of this test with the sources here."""
        self.folder.chmod(0o755)
        self.claim.mkdir()
        self.claim.chmod(0o777)
        commands = self.folder / "bin"
        commands.mkdir()
        for name, module in (("lockstep", " -m lockstep"), ("python", "")):
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n')
            script.chmod(0o755)

    # -- pods --

    def start_all(self) -> None:
        for pod in self.plans:
            self.start(pod)
        for pod in self.plans:
            self.publish_when_ready(pod)

    def start(self, pod: str) -> Program:
        """Start this pod, for the first time or again, at an address of its own."""
        place, plan = self._free.pop(0), self.plans[pod]
        self._places[pod] = place
        self._published.pop(pod, None)
        self._write_names()
        program = Program(self._enter(pod, command_of(plan)))
        self._running[pod] = program
        if plan.published_early:
            self._publish(pod)
        return program

    def run(self, pod: str, words: Sequence[str], names: Sequence[str] = ()) -> Finished:
        """Run a command in the pod's container instead of its own; ``names`` are all that the DNS knows."""
        self._places[pod] = place = self._free.pop(0)
        self._network.hosts[place].hosts_file("\n".join(f"{self._addresses[place]} {name}" for name in names))
        with Program(self._enter(pod, words)) as program:
            return program.wait(60)

    def program(self, pod: str) -> Program:
        return self._running[pod]

    def address(self, pod: str) -> str:
        return self._addresses[self._places[pod]]

    def delete(self, pod: str) -> None:
        """As if its node were gone: nothing of it runs, and nothing answers for it. Its name stays for a while."""
        place = self._places[pod]
        self._running[pod].close()
        host_network.ip("-n", self._network.namespaces[place], "link", "set", self._network.interface(place), "down")

    def probe(self, pod: str, kind: str = "startupProbe") -> int:
        """Run a probe of the container inside of it; returns its exit code."""
        words = self._inside(pod, self.plans[pod].container[kind]["exec"]["command"])
        into = ["nsenter", f"--target={self._running[pod].pid}", "--net", "--mount", "--uts", *words]
        return subprocess.run(into, capture_output=True, check=False, timeout=30).returncode

    def publish_when_ready(self, pod: str, seconds: float = 90.0) -> None:
        """Wait, as the kubelet does, until its startup probe passes; from then on its name is known."""
        deadline = time.monotonic() + seconds
        while self.probe(pod) != 0:
            program = self._running[pod]
            assert program.running(), program.stdout() + program.stderr()
            assert time.monotonic() < deadline, f"{pod} is not ready: {program.stdout()}{program.stderr()}"
        self._publish(pod)

    # -- names --

    def _publish(self, pod: str) -> None:
        self._published[pod] = self.address(pod)
        self._write_names()

    def _write_names(self) -> None:
        """A pod also knows its own hostname, from the kubelet."""
        lines = [f"{address} {' '.join(self.plans[pod].names)}" for pod, address in self._published.items()]
        for pod, place in self._places.items():
            own = f"{self._addresses[place]} {self.plans[pod].hostname}"
            self._network.hosts[place].hosts_file("\n".join([own, *lines]))

    # -- containers --

    def _enter(self, pod: str, words: Sequence[str]) -> list[str]:
        plan = self.plans[pod]
        host = namespaces.Host(plan.hostname, self._network.namespaces[self._places[pod]])
        return host.command(self._inside(pod, words), before=f"set -e\n{self._mounts(plan)}")

    def _inside(self, pod: str, words: Sequence[str]) -> list[str]:
        """The words as the container's user, with its variables and no others."""
        context = self.plans[pod].template["spec"]["securityContext"]
        user = ["setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}"]
        user += [f"--groups={context['fsGroup']}", "--inh-caps=-all", "--no-new-privs"]
        image = {
            "PATH": f"{self.folder}/bin:/usr/bin:/bin:/usr/sbin",
            "PYTHONPATH": f"{ROOT}/src:{ROOT}/tests",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "HOME": "/tmp",
        }
        kubelet = {"HOSTNAME": self.plans[pod].hostname, "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        variables = {**image, **kubelet, **variables_of(self.plans[pod])}
        return [*user, "env", "-i", *(f"{name}={value}" for name, value in variables.items()), *words]

    def _mounts(self, plan: PodPlan) -> str:
        """Shell that makes the volumes; all mounts are the pod's own."""
        lines = ["mount --make-rprivate /"]
        lines += self._visible(Path(sys.base_prefix))
        lines += [f"mount -t tmpfs tmpfs {folder}" for folder in ("/run", "/mnt")]
        volumes = {one["name"]: one for one in plan.template["spec"]["volumes"]}
        for mount in plan.container["volumeMounts"]:
            volume, path = volumes[mount["name"]], shlex.quote(mount["mountPath"])
            lines.append(f"mkdir -p {path}")
            if "emptyDir" in volume:
                size = volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()
                lines.append(f"mount -t tmpfs -o mode=1777,size={size} tmpfs {path}")
            elif "persistentVolumeClaim" in volume:
                lines.append(f"mount --bind {self.claim} {path}")
            else:
                lines += self._secret(volume["secret"], path, plan.template["spec"]["securityContext"]["fsGroup"])
        return "\n".join(lines)

    def _secret(self, volume: dict[str, Any], path: str, group: int) -> list[str]:
        lines = []
        for name, text in self._secrets[volume["secretName"]].items():
            file = f"{path}/{name}"
            lines += [f"printf %s {shlex.quote(text)} > {file}", f"chown 0:{group} {file}"]
            lines.append(f"chmod {volume['defaultMode']:o} {file}")
        return lines

    def _visible(self, folder: Path) -> list[str]:
        """A Python in a home folder that only root may enter is shown to the container's user."""
        top = Path("/", *folder.parts[1:2])
        if os.stat(top).st_mode & 0o001:
            return []
        kept = self.folder / "kept"
        return [
            f"mkdir -p {kept}",
            f"mount --bind {folder} {kept}",
            f"mount -t tmpfs -o mode=755 tmpfs {top}",
            f"mkdir -p {folder}",
            f"mount --bind {kept} {folder}",
        ]
