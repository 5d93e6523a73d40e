"""The manifests carried out: every container in a network namespace of its own, with what a cluster would give it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.kubernetes_manifest import manifest
from engines.kubernetes_parts import ENGINE
from engines.pods import Pods, planned, variables_of, why_not
from lockstep.runtime.startup.tf_config import read_tf_config

pytestmark = [*ENGINE, pytest.mark.timeout(300)]

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


def test_a_pod_that_is_lost_comes_back_elsewhere_and_the_job_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """First a worker, then the server, each with another address under the same name."""
    flags = (*BENCH, "--num_batches=400", "--display_every=10", "--save_model_steps=20")
    objects = manifest(capsys, "--image=i", "--workers=2", "--claim=c", "--", *flags)
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
        assert "\n400\t" in ended["worker-0"].stdout
        assert (pods.claim / "lockstep" / "final.safetensors").is_file()
