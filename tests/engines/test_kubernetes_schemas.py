"""The manifests against published schemas: Kubernetes' own, and those of JobSet and TFJob.

Kubernetes' JSON schemas are in the package kubernetes-validate. JobSet and TFJob publish theirs as models: of JobSet in
kubeflow-trainer-api, of TFJob in kubeflow-training. With LOCKSTEP_CRDS, a folder with the two definitions
(jobset.x-k8s.io_jobsets.yaml, kubeflow.org_tfjobs.yaml), their openAPIV3Schema is checked as well.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import pytest

from engines.kubernetes_manifest import manifest, of_kind
from engines.kubernetes_parts import ENGINE, module

pytestmark = [*ENGINE]

CASES = {
    "smallest": ["--image=r/l", "--servers=0", "--workers=1", "--", "python", "train.py"],
    "bench": ["--image=r/l", "--workers=2", "--claim=data", "--", "lockstep", "bench", "--model=lenet"],
    "everything": [
        *("--image=registry.example:5000/l@sha256:abc", "--servers=2", "--workers=3", "--name=a-b", "--namespace=team"),
        *("--cpus_per_worker=2", "--cpus_per_server=500m", "--memory_per_worker=8Gi", "--memory_per_server=1.5Gi"),
        *("--gpus_per_worker=1", "--shm=64Mi", "--claim=data", "--mount=/data", "--port=3333", "--restarts=0"),
        *("--grace=60", "--", "python", "it's: a program", "$(HOME)", "", "yes", "1e3", "- x", "#"),
    ],
}
DEFINITIONS = {"JobSet": "jobset.x-k8s.io_jobsets.yaml", "TFJob": "kubeflow.org_tfjobs.yaml"}


@pytest.fixture(params=[f"{kind} {case}" for kind in ("jobset", "tfjob") for case in CASES])
def objects(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    kind, _, case = request.param.partition(" ")
    return manifest(capsys, f"--kind={kind}", *CASES[case])


def test_kubernetes_own_objects(objects: list[dict[str, Any]]) -> None:
    validate = module("kubernetes_validate", "kubernetes-validate")
    checked = [one for one in objects if one["kind"] in ("Secret", "NetworkPolicy")]
    assert len(checked) == 2
    for one in (*checked, *_wrapped(objects[-1])):
        validate.validate(one, validate.latest_version(), strict=True)


def _wrapped(job: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates inside a job, as objects of their own."""
    if job["kind"] == "TFJob":
        templates = [one["template"] for one in job["spec"]["tfReplicaSpecs"].values()]
        return [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates]
    jobs = [one["template"] for one in job["spec"]["replicatedJobs"]]
    return [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **one} for one in jobs]


def test_the_job_itself(objects: list[dict[str, Any]]) -> None:
    job = objects[-1]
    if job["kind"] == "JobSet":
        models = module("kubeflow_trainer_api.models", "kubeflow-trainer-api")
        # What the model does not know is missing when it writes again what it has read; defaults may be added.
        assert _missing(job, models.JobsetV1alpha2JobSet.from_dict(job).to_dict(), "JobSet") == []
    else:
        models = module("kubeflow.training.models", "kubeflow-training")
        _known(job, "KubeflowOrgV1TFJob", models, "TFJob")


def _missing(value: Any, found: Any, where: str) -> list[str]:
    if isinstance(value, dict) and isinstance(found, dict):
        return [gap for key in value for gap in _missing(value[key], found.get(key), f"{where}.{key}")]
    if isinstance(value, list) and isinstance(found, list) and len(value) == len(found):
        return [gap for one, other in zip(value, found, strict=True) for gap in _missing(one, other, where)]
    return [] if value == found else [where]


def _known(value: Any, kind: str, models: Any, where: str) -> None:
    """Every name in ``value`` is one of the model's, all the way down."""
    if found := re.fullmatch(r"list\[(.*)\]", kind):
        assert isinstance(value, list), where
        for inner in value:
            _known(inner, found[1], models, where)
    elif found := re.fullmatch(r"dict\(str, (.*)\)", kind):
        assert isinstance(value, dict), where
        for key, inner in value.items():
            _known(inner, found[1], models, f"{where}.{key}")
    elif plain := {"str": str, "int": int, "bool": bool}.get(kind):
        assert isinstance(value, plain), f"{where}: {value!r} is no {kind}"
    elif kind != "object":
        model = getattr(models, kind, None) or getattr(module("kubernetes.client", "kubernetes"), kind)
        names = {name: model.openapi_types[own] for own, name in model.attribute_map.items()}
        for key, inner in value.items():
            assert key in names, f"{where} has no {key}"
            _known(inner, names[key], models, f"{where}.{key}")


@pytest.mark.skipif(not os.environ.get("LOCKSTEP_CRDS"), reason="LOCKSTEP_CRDS names no folder with definitions")
def test_the_definition_of_the_job(objects: list[dict[str, Any]]) -> None:
    job = objects[-1]
    _validator(DEFINITIONS[job["kind"]], job["apiVersion"].partition("/")[2]).validate(job)


@functools.cache
def _validator(name: str, version: str) -> Any:
    definition = module("yaml", "PyYAML").safe_load(Path(os.environ["LOCKSTEP_CRDS"], name).read_text())
    (schema,) = [one["schema"] for one in definition["spec"]["versions"] if one["name"] == version]
    return module("jsonschema", "jsonschema").Draft202012Validator(_closed(schema["openAPIV3Schema"]))


def _closed(schema: Any) -> Any:
    """The same schema, in which a name that is not listed is a mistake; quantities may be numbers or texts."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(one) for key, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    return closed


def test_every_word_arrives_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    job = of_kind(manifest(capsys, *CASES["everything"]), "JobSet")
    (container,) = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    program = CASES["everything"][CASES["everything"].index("--") + 1 :]
    assert container["command"][:4] == ["lockstep", "run", "--restarts=0", "--"]
    assert [word.replace("$$(", "$(") for word in container["command"][4:]] == program
