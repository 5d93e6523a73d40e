"""Writes a JobSet, or a TFJob for Kubeflow's training operator, with everything that it needs besides an image.

The key of the job is a Secret, a NetworkPolicy lets only the job's own pods in, and the probes ask the monitor of each
task. A pod that is lost comes back under its name; one that ends with an error, such as a wrong flag, does not
(docs/kubernetes.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
from collections.abc import Iterator
from typing import Any, Final

from lockstep.cli.flags.parsing import CommandLine, read_command_line
from lockstep.cli.flags.table import TABLE
from lockstep.cli.manifest.yaml_text import yaml_text
from lockstep.cli.run import RESTARTS
from lockstep.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_VERDICT, BadInput
from lockstep.protocol.core.timing import GRACE_SECONDS, STOP_SECONDS
from lockstep.runtime.startup.tf_config import VARIABLE as TF_CONFIG
from lockstep.security.chosen import INSECURE_VARIABLE, is_insecure
from lockstep.security.key import KEY_BYTES, KEY_VARIABLE, find_key
from lockstep.version import __version__

EXAMPLE = "lockstep manifest kubernetes --image=REGISTRY/lockstep --workers=2 -- lockstep bench | kubectl apply -f -"

JOBSET, TFJOB = "jobset", "tfjob"
PORT: Final = 2222
STARTUP_SECONDS: Final = 900
"""A node may have to load the image first."""
LONGEST_NAME: Final = 40
"""The operators add the role and the number, and a name in DNS has 63 characters at most."""
USER: Final = 1000
_KEY_FOLDER: Final = "/run/lockstep"
_INDEX: Final = "LOCKSTEP_INDEX"
_SAVE_SECONDS: Final = 300
_PROBE: Final = ("lockstep", "why", "--alive")
_TEXT: Final = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|[kMGTP]i?)?")

Values = dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--image", required=True, help="the image that has lockstep, torch and your program (see the Dockerfile)")
    add("--kind", choices=(JOBSET, TFJOB), default=JOBSET, help="what to write (default: jobset)")
    add("--name", default="lockstep", help="the job's name (default: lockstep)")
    add("--namespace", default="", help="where it runs (default: that of kubectl)")
    add("--servers", type=int, default=1, metavar="N", help="parameter servers (default: 1; 0: every rank trains)")
    add("--workers", type=int, required=True, metavar="N", help="workers")
    add("--cpus_per_worker", default="1", metavar="N", help="cores of each worker (default: 1)")
    add("--cpus_per_server", default="1", metavar="N", help="cores of each server (default: 1)")
    add("--memory_per_worker", default="", metavar="SIZE", help="memory of each worker, such as 8Gi (no limit)")
    add("--memory_per_server", default="", metavar="SIZE", help="memory of each server (no limit)")
    add("--gpus_per_worker", type=int, default=0, metavar="N", help="GPUs of each worker (default: 0)")
    add("--shm", default="1Gi", metavar="SIZE", help="size of /dev/shm (default: 1Gi)")
    add("--claim", default="", metavar="NAME", help="a volume claim that all pods can write to, for checkpoints")
    add("--mount", default="/mnt/lockstep", metavar="FOLDER", help="where the claim is (default: /mnt/lockstep)")
    add("--port", type=int, default=PORT, metavar="N", help=f"where monitors listen (default: {PORT})")
    add("--restarts", type=int, default=RESTARTS, metavar="N", help="how often a lost task or pod comes back (3)")
    add("--grace", type=int, default=int(GRACE_SECONDS), metavar="SECONDS", help="time to save a checkpoint (25)")


def write(args: argparse.Namespace) -> str:
    """The manifest. BadInput if it would not run."""
    problems = list(_problems(args))
    if problems:
        raise BadInput(problems)
    secret = "" if is_insecure() else "It contains the key of the job: keep it to yourself. "
    head = f"# Made by Lockstep {__version__}. {secret}docs/kubernetes.md explains it.\n"
    return head + yaml_text(documents(args))


def documents(args: argparse.Namespace) -> list[Values]:
    """The objects, as values."""
    job = _jobset(args) if args.kind == JOBSET else _tfjob(args)
    return [*_secret(args), _policy(args), job]


def _problems(args: argparse.Namespace) -> Iterator[str]:
    if not _TEXT.fullmatch(args.name) or len(args.name) > LONGEST_NAME:
        yield f"--name={args.name} is no name; use up to {LONGEST_NAME} of a-z, 0-9 and '-', beginning with a letter."
    for flag in ("namespace", "claim"):
        if (given := getattr(args, flag)) and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", given):
            yield f"--{flag}={given} is no name in Kubernetes; use a-z, 0-9, '-' and '.'."
    if args.workers < 1:
        yield f"--workers={args.workers} leaves none to train; give 1 or more."
    for flag in ("servers", "gpus_per_worker", "restarts", "grace"):
        if getattr(args, flag) < 0:
            yield f"--{flag}={getattr(args, flag)} is negative; give 0 or more."
    if not 1024 <= args.port <= 65535:
        yield f"--port={args.port} is not a port from 1024 to 65535; others are for root."
    for flag in ("cpus_per_worker", "cpus_per_server", "memory_per_worker", "memory_per_server", "shm"):
        if (given := getattr(args, flag)) and not _QUANTITY.fullmatch(given):
            yield f"--{flag}={given} is no quantity; write, for example, 2, 500m or 8Gi."
    if not args.mount.startswith("/"):
        yield f"--mount={args.mount} must begin with '/'."
    yield from _command_problems(args)


# -- what every pod runs --


def _bench_line(args: argparse.Namespace) -> CommandLine | None:
    return read_command_line(args.program[2:], TABLE) if args.program[:2] == ("lockstep", "bench") else None


def _command_problems(args: argparse.Namespace) -> Iterator[str]:
    line = _bench_line(args)
    if line is None:
        return
    yield from line.mistakes
    taken = [
        name for name in ("ps", "workers", "job_name", "task_index", "ps_hosts", "worker_hosts") if name in line.given
    ]
    if taken:
        named = " and ".join(f"--{name}" for name in taken)
        yield f"{named} of the benchmark must be left out here: every pod learns from {TF_CONFIG} which task it is."


def command_of(args: argparse.Namespace) -> list[str]:
    """The same in every pod; a flag that was given stays as it is."""
    line = _bench_line(args)
    if line is None:
        if args.program[:2] == ("lockstep", "run"):
            return list(args.program)
        return ["lockstep", "run", f"--restarts={args.restarts}", "--", *args.program]
    waits = dict.fromkeys(("startup_timeout", "rejoin_timeout"), STARTUP_SECONDS)
    added: dict[str, object] = {**waits, "restarts": args.restarts, "grace": args.grace}
    if args.claim:
        added["train_dir"] = f"{args.mount.rstrip('/')}/{args.name}"
        if "save_model_steps" not in line.given:
            added["save_model_secs"] = _SAVE_SECONDS
    return [*args.program, *(f"--{name}={value}" for name, value in added.items() if name not in line.given)]


def _container(args: argparse.Namespace, role: str, name: str, variables: list[Values]) -> Values:
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    if args.claim:
        mounts.append({"name": "data", "mountPath": args.mount})
    if is_insecure():
        variables = [*variables, {"name": INSECURE_VARIABLE, "value": "1"}]
    else:
        mounts.append({"name": "key", "mountPath": _KEY_FOLDER})
        variables = [*variables, {"name": KEY_VARIABLE, "value": f"{_KEY_FOLDER}/key"}]
    ask = {"exec": {"command": list(_PROBE)}, "timeoutSeconds": 10}
    return {
        "name": name,
        "image": args.image,
        # Kubernetes would put the value of a variable in place of $(NAME).
        "command": [word.replace("$(", "$$(") for word in command_of(args)],
        "env": variables,
        "ports": [{"name": "tfjob-port", "containerPort": args.port}],
        "resources": _resources(args, role),
        "volumeMounts": mounts,
        # Until the task has joined: a program may prepare its data first.
        "startupProbe": {**ask, "periodSeconds": 5, "failureThreshold": STARTUP_SECONDS // 5},
        "readinessProbe": {**ask, "periodSeconds": 30},
        "livenessProbe": {**ask, "periodSeconds": 30, "failureThreshold": 4},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _resources(args: argparse.Namespace, role: str) -> Values:
    kind = "server" if role == "ps" else "worker"
    memory = getattr(args, f"memory_per_{kind}")
    requests: Values = {"cpu": getattr(args, f"cpus_per_{kind}")}
    limits: Values = {}
    if memory:
        requests["memory"] = limits["memory"] = memory
    if role == "worker" and args.gpus_per_worker:
        limits["nvidia.com/gpu"] = str(args.gpus_per_worker)
    return {"requests": requests, **({"limits": limits} if limits else {})}


def _pod(args: argparse.Namespace, container: Values) -> Values:
    volumes: list[Values] = [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": args.shm}}]
    if args.claim:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": args.claim}})
    if not is_insecure():
        # Root's own file, which the pod's group may read.
        volumes.append({"name": "key", "secret": {"secretName": f"{args.name}-key", "defaultMode": 0o440}})
    return {
        "metadata": {"labels": _labels(args)},
        "spec": {
            # A checkpoint takes the grace, and a task that does not end is killed after that.
            "terminationGracePeriodSeconds": args.grace + int(STOP_SECONDS) + 10,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }


def _labels(args: argparse.Namespace) -> Values:
    return {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": args.name}


def _roles(args: argparse.Namespace) -> dict[str, int]:
    return {role: count for role, count in (("ps", args.servers), ("worker", args.workers)) if count}


def _metadata(args: argparse.Namespace, name: str) -> Values:
    where = {"namespace": args.namespace} if args.namespace else {}
    return {"name": name, **where, "labels": _labels(args)}


# -- the objects --


def _secret(args: argparse.Namespace) -> Iterator[Values]:
    if is_insecure():
        return
    named = os.environ.get(KEY_VARIABLE)
    key = find_key(named).path.read_text().strip() if named else secrets.token_hex(KEY_BYTES)
    yield {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": _metadata(args, f"{args.name}-key"),
        "type": "Opaque",
        "stringData": {"key": key},
    }


def _policy(args: argparse.Namespace) -> Values:
    own = {"podSelector": {"matchLabels": _labels(args)}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(args, args.name),
        "spec": {**own, "policyTypes": ["Ingress"], "ingress": [{"from": [own]}]},
    }


def _jobset(args: argparse.Namespace) -> Values:
    roles = _roles(args)
    hosts = {
        role: [f"{args.name}-{role}-0-{index}.{args.name}:{args.port}" for index in range(count)]
        for role, count in roles.items()
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(args, args.name),
        "spec": {
            # A pod must have its name before it is ready: the others wait for it.
            "network": {"enableDNSHostnames": True, "subdomain": args.name, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["worker"]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [
                {"name": role, "replicas": 1, "template": {"spec": _indexed_job(args, role, count, hosts)}}
                for role, count in roles.items()
            ],
        },
    }


def _indexed_job(args: argparse.Namespace, role: str, count: int, hosts: dict[str, list[str]]) -> Values:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    task = f'{{"type": "{role}", "index": $({_INDEX})}}'
    said = f'{{"cluster": {json.dumps(hosts)}, "task": {task}}}'
    variables: list[Values] = [{"name": _INDEX, "valueFrom": index}, {"name": TF_CONFIG, "value": said}]
    pod = _pod(args, _container(args, role, "lockstep", variables))
    pod["spec"] = {"restartPolicy": "Never", **pod["spec"]}
    return {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": args.restarts * count,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                # Evicted, preempted, its node drained or gone: no failure of the job.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "lockstep",
                        "operator": "In",
                        "values": [EXIT_FAILED, EXIT_BAD_INPUT, EXIT_VERDICT],
                    },
                },
            ]
        },
        "template": pod,
    }


def _tfjob(args: argparse.Namespace) -> Values:
    kinds = {"ps": "PS", "worker": "Worker"}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "TFJob",
        "metadata": _metadata(args, args.name),
        "spec": {
            "runPolicy": {"cleanPodPolicy": "Running"},
            "successPolicy": "AllWorkers",
            "tfReplicaSpecs": {
                kinds[role]: {
                    "replicas": count,
                    # Codes from 128 on, which signals leave, bring the pod back; ours for errors do not.
                    "restartPolicy": "ExitCode",
                    "template": _pod(args, _container(args, role, "tensorflow", [])),
                }
                for role, count in _roles(args).items()
            },
        },
    }
