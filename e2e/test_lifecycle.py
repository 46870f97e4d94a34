"""What users do to jobs in mid-run: suspend, resume, delete, run two at once; and who may make a function run."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from harness.chart import Chart
from harness.images import Images
from harness.jobs import KEPT, Jobs, PodCounts, short
from harness.kubectl import Kubectl
from rlhfless_functions.api import STAGES


@pytest.fixture
def jobs(chart: Chart, kubectl: Kubectl) -> Jobs:
    return Jobs(kubectl)


def nothing_is_left(jobs: Jobs, name: str) -> None:
    jobs.kubectl.wait_until(f"nothing of {name} is left", lambda: not jobs.objects(name), 120)


def held(jobs: Jobs, name: str) -> list[str]:
    """What a job has in the namespace besides its token, which it keeps."""
    return [each for each in jobs.objects(name) if each != f"secret/{name}-token"]


def test_a_suspended_job_holds_no_pods_and_goes_on_where_it_was(jobs: Jobs) -> None:
    jobs.apply(short("suspended", steps=4, **KEPT))
    before = jobs.wait("suspended", "a step is done", lambda status: status.get("step", 0) >= 1, 400)
    jobs.patch("suspended", {"suspend": True})
    jobs.wait("suspended", "suspended", lambda status: status.get("phase") == "Suspended", 120)
    jobs.kubectl.wait_until("it holds no pods", lambda: not held(jobs, "suspended"), 120)
    jobs.patch("suspended", {"suspend": False})
    status = jobs.wait_succeeded("suspended", 600)
    assert status["uid"] == before["uid"]
    assert status["step"] == 4
    jobs.delete("suspended")


def test_a_stage_has_no_pods_while_another_works_for_longer_than_they_take_to_start(jobs: Jobs) -> None:
    released = {"instances": {"min": 2, "max": 2}, "keepAlive": "0s"}
    # On two idle cores the learner takes 17 s for so many epochs. Pods take about 10 s to go and to come.
    job = short("released", generation=released, preparation={"keepAlive": "0s"}, algorithm={"epochs": 128})
    with PodCounts(jobs.kubectl, "released") as pods:
        jobs.apply(job)
        status = jobs.wait_succeeded("released", 900)
        jobs.kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": "released"})
    jobs.delete("released")
    print({stage: pods.counts[stage] for stage in pods.counts})
    # How long the learner takes is not known before it has learnt once: pods may be asked for at once then.
    assert pods.rises("generation") >= status["step"] - 1
    assert pods.rises("preparation") >= status["step"] - 1
    assert pods.most("generation") == 2
    assert pods.most("preparation") == pods.most("learning") == 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_job_that_is_deleted_leaves_nothing(jobs: Jobs, stage: str) -> None:
    name = f"deleted-in-{stage}"
    jobs.apply(short(name, steps=20, **KEPT))
    jobs.kubectl.wait_until(
        f"{stage} has a pod",
        lambda: jobs.kubectl.list("pods", **{"rlhfless.io__job": name, "rlhfless.io__stage": stage}),
        400,
    )
    jobs.delete(name)
    nothing_is_left(jobs, name)


def test_two_jobs_run_at_once(jobs: Jobs) -> None:
    for name in ("one", "two"):
        jobs.apply(short(name, steps=2, **KEPT))
    for name in ("one", "two"):
        assert jobs.wait_succeeded(name, 900)["step"] == 2
        jobs.delete(name)


@pytest.fixture
def elsewhere(kubectl: Kubectl, images: Images) -> Iterator[Kubectl]:
    """kubectl in another namespace, with the pod `stranger`."""
    other = Kubectl(f"{kubectl.namespace}-other", kubectl.patience)
    other("create", "namespace", other.namespace)
    other("run", "stranger", f"--image={images.operator}", "--command", "--", "sleep", "infinity")
    other("wait", "pod/stranger", "--for=condition=Ready", f"--timeout={int(60 * kubectl.patience)}s")
    yield other
    other("delete", "namespace", other.namespace, "--wait=false")


def test_a_function_runs_for_its_job_alone(jobs: Jobs, elsewhere: Kubectl) -> None:
    kubectl = jobs.kubectl
    jobs.apply(short("private", steps=20, **KEPT))
    jobs.wait("private", "a step is done", lambda status: status.get("step", 0) >= 1, 400)
    secret = base64.b64decode(kubectl.get("secret", "private-token")["data"]["token"]).decode()
    ask = (
        "import sys, urllib.request, urllib.error\n"
        "request = urllib.request.Request(sys.argv[1], b'{}', {'authorization': 'Bearer ' + sys.argv[2]})\n"
        "try:\n"
        "    print(urllib.request.urlopen(request, timeout=60).status)\n"
        "except urllib.error.HTTPError as error:\n"
        "    print(error.code)\n"
    )
    url = f"http://private-preparation.{kubectl.namespace}.svc.cluster.local/v1/run"

    def answer(inside: Kubectl, pod: str, token: str) -> str:
        return inside("exec", pod, "--", "python3", "-c", ask, url, token).strip()

    assert answer(kubectl, "storage", "guessed") == "401"
    assert answer(elsewhere, "stranger", "guessed") == "401"
    # With the token a request is read, and this one is none of the contract.
    assert answer(kubectl, "storage", secret) == "422"
    assert secret not in kubectl("get", "rlhfjob", "private", "--output=json")
    jobs.delete("private")


def test_a_document_with_faults_is_refused_or_explained(jobs: Jobs) -> None:
    with pytest.raises(Exception, match="should be greater than or equal to 1"):
        jobs.apply(short("refused", steps=0))
    jobs.apply(short("explained", data={"source": "missing.jsonl"}))

    def explained() -> dict[str, Any] | None:
        status = jobs.status("explained")
        return status if status.get("phase") == "Failed" else None

    status = jobs.kubectl.wait_until("the fault is explained", explained, 300)
    assert "missing.jsonl" in status["message"]
    jobs.delete("explained")
