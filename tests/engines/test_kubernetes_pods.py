"""The manifests carried out: every container in a network namespace of its own, with what a cluster would give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.kubernetes_manifest import manifest
from engines.kubernetes_parts import ENGINE
from engines.pods import Pods, planned, variables_of, why_not
from helpers.programs import run_lockstep
from lockstep.runtime.startup.tf_config import read_tf_config

pytestmark = [*ENGINE, pytest.mark.timeout(600)]

BENCH = ("lockstep", "bench", "--model=trivial", "--data_name=digits", "--device=cpu", "--batch_size=8")
PROGRAM = Path(__file__).with_name("trains_in_pods.py")
END = 150.0


@pytest.fixture(scope="module", autouse=True)
def _can_be_run() -> None:
    if missing := why_not():
        pytest.fail(missing, pytrace=False)


@pytest.mark.parametrize("kind", ["jobset", "tfjob"])
def test_every_pod_learns_which_task_it_is(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = planned(manifest(capsys, f"--kind={kind}", "--image=i", "--servers=2", "--workers=2", "--", *BENCH))
    assert list(plans) == ["ps-0", "ps-1", "worker-0", "worker-1"]
    for pod, plan in plans.items():
        found = read_tf_config(variables_of(plan))
        assert found is not None
        assert f"{found.role}-{found.index}" == pod
        own = found.lists()[0 if found.role == "ps" else 1][found.index]
        assert own.partition(":")[0] in plan.names


def test_a_pod_that_is_lost_comes_back_elsewhere_and_the_job_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First a worker, then the server, each with another address under the same name; the bits are as without that."""
    flags = (*BENCH, "--num_batches=300", "--display_every=10", "--save_model_steps=20", "--num_threads=1")
    objects = manifest(capsys, "--image=i", "--workers=2", "--claim=c", "--", *flags)
    final: list[bytes] = []
    with Pods(objects, spares=2) as pods:
        pods.start_all()
        chief = pods.program("worker-0")
        for pod, step in (("worker-1", "\n20\t"), ("ps-0", "\n60\t")):
            chief.wait_for(step, END)
            former = pods.address(pod)
            pods.delete(pod)
            pods.start(pod)
            assert pods.address(pod) != former
        ended = {pod: pods.program(pod).wait(END) for pod in pods.plans}
        assert {pod: one.code for pod, one in ended.items()} == dict.fromkeys(pods.plans, 0), ended
        assert "\n300\t" in ended["worker-0"].stdout
        undisturbed = tmp_path / "undisturbed"
        assert run_lockstep(*flags[1:], "--ps=1", "--workers=2", f"--train_dir={undisturbed}", timeout=END).code == 0
        for run in (undisturbed, pods.claim / "lockstep"):
            final.append((run / "final.safetensors").read_bytes())
    assert final[0] == final[1]


def test_a_worker_of_your_own_program_comes_back_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    """In a TFJob, whose names are known only once a pod is ready: nobody waits for the own name to become so."""
    program = ("python", str(PROGRAM), "60000", "--until-lost")
    with Pods(manifest(capsys, "--kind=tfjob", "--image=i", "--workers=2", "--", *program), spares=1) as pods:
        pods.start_all()
        chief = pods.program("worker-0")
        chief.wait_for("step 20\n", END)
        former = pods.address("worker-1")
        pods.delete("worker-1")
        pods.start("worker-1")
        pods.publish_when_ready("worker-1")
        assert pods.address("worker-1") != former
        ended = {pod: pods.program(pod).wait(END) for pod in pods.plans}
        assert {pod: one.code for pod, one in ended.items()} == dict.fromkeys(pods.plans, 0), ended
        assert "does not lead here yet" in ended["worker-1"].stderr


def test_a_wrong_flag_is_final_and_a_kill_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag is one that only the pod can find wrong; the policy is what the manifest says of its exit code."""
    for kind in ("jobset", "tfjob"):
        flags = ("--restarts=0", "--data_dir=/no/such/folder")
        objects = manifest(capsys, f"--kind={kind}", "--image=i", "--workers=1", "--", *BENCH, *flags)
        with Pods(objects) as pods:
            ended = pods.start("worker-0").wait(END)
            assert ended.code == 2, ended
            plan = pods.plans["worker-0"]
            assert [plan.comes_back(code) for code in (0, 1, ended.code, 3, 137, 143)] == [False] * 4 + [True] * 2


def test_the_doctor_in_a_pod_whose_service_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a flag nor a file tells it where it is."""
    objects = manifest(capsys, "--image=i", "--workers=1", "--", *BENCH)
    with Pods(objects) as pods:
        said = pods.run("worker-0", ["lockstep", "doctor"], names=["kubernetes.default.svc"])
        assert said.code == 1, said
        assert "lockstep doctor for worker 0 in a Kubernetes pod" in said.stdout
        assert "headless service of the job is missing" in said.stdout
        blind = pods.run("ps-0", ["lockstep", "doctor"])
        assert blind.code == 1, blind
        assert "the cluster's DNS is not ready" in blind.stdout
