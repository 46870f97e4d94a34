"""Two namespaces on one artifact store: nothing of one is read, written or deleted by the other."""

import json
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from harness.chart import Chart
from harness.jobs import KEPT, Jobs, short
from harness.kubectl import Kubectl, KubectlError
from harness.options import Options
from harness.storage import Storage, folder_of

NAME = "twin"
STEPS = 2


@pytest.fixture(scope="module")
def other(chart: Chart, kubectl: Kubectl, storage: Storage, options: Options) -> Iterator[Kubectl]:
    """Another namespace, whose claims are on the storage of the first."""
    if options.storage_class is not None:
        pytest.skip("two namespaces can't share storage of a storage class")
    other = Kubectl(f"rlhfless-e2e-{secrets.token_hex(3)}", options.patience)
    other("create", "namespace", other.namespace)
    storage.lend(other)
    chart.install(namespaces=[kubectl.namespace, other.namespace])
    yield other
    other("delete", "rlhfjobs", "--all", f"--timeout={int(120 * options.patience)}s")
    chart.install()
    if not options.keep:
        other("delete", "namespace", other.namespace, "--wait=false")
        storage.take_back(other)


@pytest.fixture(scope="module")
def mine(other: Kubectl, kubectl: Kubectl, storage: Storage) -> str:
    """Checksums of all files of a finished job, which no other tenant may change."""
    jobs = Jobs(kubectl)
    jobs.apply(short(NAME, steps=STEPS))
    jobs.wait_succeeded(NAME, 900)
    return checksums(storage, storage.job(NAME))


def checksums(storage: Storage, folder: str) -> str:
    return storage.run("sh", "-c", f"cd {folder} && find . -type f | sort | xargs sha256sum")


def refusal_of(jobs: Jobs, job: dict[str, Any]) -> str:
    """The message with which the operator refuses a job."""
    name = job["metadata"]["name"]
    jobs.kubectl("apply", "-f", "-", given=json.dumps(job))
    jobs.kubectl.wait_until(f"{name} is refused", lambda: jobs.status(name).get("phase") == "Failed", 120)
    status = jobs.status(name)
    jobs.delete(name)
    assert status["reason"] in ("InvalidSpec", "FolderTaken"), status
    return str(status["message"])


def test_jobs_of_one_name_have_a_folder_each(other: Kubectl, storage: Storage, mine: str, kubectl: Kubectl) -> None:
    jobs = Jobs(other)
    twin = short(NAME, steps=STEPS)
    twin["metadata"]["annotations"] = {"rlhfless.io/adopt": "true"}
    jobs.apply(twin)
    jobs.wait_succeeded(NAME, 900)
    theirs = folder_of(other.namespace, NAME)
    owner = json.loads(storage.read(f"{theirs}/owner.json"))
    assert owner["namespace"] == other.namespace
    assert checksums(storage, storage.job(NAME)) == mine
    jobs.delete(NAME)


@pytest.mark.parametrize("uri", ["../{mine}/runs", "/etc", "file:///artifacts/../artifacts", "s3://elsewhere/runs"])
def test_a_folder_elsewhere_is_refused(other: Kubectl, kubectl: Kubectl, storage: Storage, mine: str, uri: str) -> None:
    job = short(NAME, steps=STEPS + 1, artifacts={"uri": uri.format(mine=kubectl.namespace)})
    job["metadata"]["annotations"] = {"rlhfless.io/adopt": "true"}
    assert "spec.artifacts.uri" in refusal_of(Jobs(other), job)
    assert checksums(storage, storage.job(NAME)) == mine


@pytest.mark.parametrize(
    "pods",
    [
        {"volumes": [{"claim": "artifacts", "mountPath": "/all"}]},
        {"template": {"spec": {"volumes": [{"name": "x", "persistentVolumeClaim": {"claimName": "artifacts"}}],
                               "containers": [{"name": "function",
                                               "volumeMounts": [{"name": "x", "mountPath": "/all"}]}]}}},
    ],
    ids=["a volume", "a template"],
)  # fmt: skip
def test_a_job_that_mounts_the_whole_store_is_refused(other: Kubectl, pods: dict[str, Any]) -> None:
    job = short(f"greedy-{next(iter(pods))}", pods=pods)
    assert "holds the artifacts of all namespaces" in refusal_of(Jobs(other), job)


def test_a_pod_sees_its_namespaces_folder_alone_and_links_lead_the_operator_nowhere(
    other: Kubectl, kubectl: Kubectl, storage: Storage, mine: str
) -> None:
    jobs = Jobs(other)
    job = short("planter", steps=8, **KEPT)  # Its pods are there for as long as it has steps.
    jobs.apply(job)
    jobs.wait("planter", "a step", lambda status: status.get("step", 0) >= 1, 400)
    (pod, *_) = other.list("pods", **{"rlhfless.io__job": "planter", "rlhfless.io__stage": "generation"})
    name, theirs, victim = pod["metadata"]["name"], folder_of(other.namespace, "planter"), storage.job(NAME)

    def inside(code: str) -> str:
        return other("exec", name, "--container", "function", "--", "python", "-c", code)

    assert inside("import os; print(os.listdir('/artifacts'))").strip() == str([other.namespace])
    with pytest.raises(KubectlError):
        inside(f"print(open('{victim}/owner.json').read())")
    # What the operator removes and writes in its folder, it would remove and write elsewhere.
    inside(
        "import os\n"
        f"for name in ('model', 'traces', 'journal', 'replay'):\n"
        f"    place = '{theirs}/' + name\n"
        f"    os.path.isdir(place) and not os.path.islink(place) and os.rename(place, place + '-moved')\n"
        f"    os.path.lexists(place) or os.symlink('{victim}', place)\n"
    )
    jobs.kubectl.wait_until(
        "the job has ended", lambda: jobs.status("planter").get("phase") in ("Succeeded", "Failed"), 900
    )
    jobs.delete("planter")
    assert checksums(storage, victim) == mine


def test_a_folder_that_is_a_link_is_refused(other: Kubectl, storage: Storage, mine: str, kubectl: Kubectl) -> None:
    storage.run("ln", "-s", f"/artifacts/{kubectl.namespace}/runs", f"/artifacts/{other.namespace}/theirs")
    job = short(NAME, steps=STEPS + 1, artifacts={"uri": "theirs"})
    job["metadata"]["annotations"] = {"rlhfless.io/adopt": "true"}
    assert "is a link" in refusal_of(Jobs(other), job)
    assert checksums(storage, storage.job(NAME)) == mine


def test_the_owner_goes_on_where_it_was(kubectl: Kubectl, storage: Storage, mine: str) -> None:
    jobs = Jobs(kubectl)
    jobs.patch(NAME, {"steps": STEPS + 1})
    jobs.wait(NAME, "one more step", lambda status: status.get("step") == STEPS + 1, 600)
    jobs.wait_succeeded(NAME, 300)
    jobs.delete(NAME)
