"""Pods that use GPUs in turns, by ResourceClaims: each starts once, one at a time is awake, weights are the same."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.chart import Chart
from harness.jobs import QUICKSTART, STEPS, Jobs, finish_as, in_stage, quickstart, short, steps_of, weights_of
from harness.kubectl import Kubectl, is_ready
from harness.options import Options
from harness.storage import Storage
from rlhfless_functions.api import STAGES
from tests.prerequisites import needs_claims

pytestmark = needs_claims("no GPU is used in turns")

ONE_GPU: dict[str, Any] = {
    "pods": {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
    "generation": {"instances": {"min": 1, "max": 1}},
}
CLAIM = "rlhfless-default-0-0"
CHARGED = ("starting", "busy", "idle", "switching", "draining")


@pytest.fixture(scope="module")
def jobs(chart: Chart, kubectl: Kubectl, options: Options) -> Iterator[Jobs]:
    """Jobs of a pool with one slot."""
    chart.install(pools={"default": {"gpus": 1, "deviceClass": options.device_class}})
    yield Jobs(kubectl)
    kubectl("delete", "rlhfjobs", "--all", "--timeout=120s")
    kubectl.wait_until("the claims are given back", lambda: not kubectl("get", "resourceclaims", "-o", "name"), 120)
    chart.install()


def spans(storage: Storage, root: str) -> list[dict[str, Any]]:
    """A job's ledger."""
    return [json.loads(line) for line in storage.read(f"{root}/ledger.jsonl").splitlines()]


def awake_spans(kubectl: Kubectl, pod: str) -> list[tuple[datetime, datetime]]:
    """When a pod says that it was awake: from a task's start until it slept, or said its last word."""
    found = []
    since = None
    at = None
    for line in kubectl("logs", pod, "--container=function").splitlines():
        if not line.startswith("{"):
            # A library's own words.
            continue
        entry = json.loads(line)
        at = datetime.fromisoformat(entry["time"])
        if entry["message"] == "task started" and since is None:
            since = at
        elif entry["message"] == "instance sleeps" and since is not None:
            found.append((since, at))
            since = None
    if since is not None and at is not None:
        found.append((since, at))
    return found


def test_three_pods_share_one_gpu(jobs: Jobs, kubectl: Kubectl, storage: Storage, undisturbed: str) -> None:
    name, root = "one-slot", "/artifacts/runs/one-slot"
    jobs.apply(short(name, **ONE_GPU))
    seen: dict[str, dict[str, Any]] = {}
    awake: dict[str, list[tuple[datetime, datetime]]] = {}

    def ended(status: dict[str, Any]) -> bool:
        for pod in kubectl.list("pods", **{"rlhfless.io__job": name}):
            seen[pod["metadata"]["name"]] = pod
            # Their logs go with them.
            if is_ready(pod):
                awake[pod["metadata"]["name"]] = awake_spans(kubectl, pod["metadata"]["name"])
        return status.get("phase") == "Succeeded"

    jobs.wait(name, "succeeded", ended, 900)
    assert weights_of(storage, root) == undisturbed
    assert steps_of(storage, root) == list(range(1, STEPS + 1))
    assert sorted(pod["metadata"]["labels"]["rlhfless.io/stage"] for pod in seen.values()) == sorted(STAGES)
    for pod in seen.values():
        assert [each["resourceClaimName"] for each in pod["spec"]["resourceClaims"]] == [CLAIM]
        function, *_ = (each for each in pod["spec"]["containers"] if each["name"] == "function")
        assert function["resources"]["claims"] == [{"name": CLAIM}]
        assert "nvidia.com/gpu" not in function["resources"].get("limits", {})
    assert set(awake) == set(seen)
    told = sorted(span for each in awake.values() for span in each)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(told)), "two were awake at once"
    busy = [each for each in spans(storage, root) if each["state"] in ("busy", "idle", "switching")]
    moments = sorted({each["start"] for each in busy})
    most = max(sum(each["start"] <= moment < each["end"] for each in busy) for moment in moments)
    assert most == 1, "the ledger has two awake at once"
    jobs.delete(name)


def test_the_quickstart_costs_what_it_does_on_a_machine_with_one_gpu(
    jobs: Jobs, kubectl: Kubectl, storage: Storage, tmp_path: Path
) -> None:
    """In seconds of the GPU: while somebody is awake on it."""
    name = "quickstart-slot"
    job = quickstart(name, **ONE_GPU)
    document = tmp_path / "job.yaml"
    document.write_text(yaml.safe_dump(job))
    for file in QUICKSTART.parent.iterdir():
        if file.suffix != ".yaml":
            (tmp_path / file.name).symlink_to(file)
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(document), "--threads", "1"]
    folder = tmp_path / "runs"
    # The name of a GPU, of which nothing more is used: the stages take turns on it.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    subprocess.run([*command, "--artifacts", str(folder)], check=True, stdout=subprocess.DEVNULL, env=environment)
    jobs.apply(job)
    jobs.wait_succeeded(name, 3000)
    root = f"/artifacts/runs/{name}"
    here = [json.loads(line) for line in (folder / name / "ledger.jsonl").read_text().splitlines()]
    there = spans(storage, root)
    figures = {
        place: {state: round(seconds_in(ledger, state), 1) for state in CHARGED}
        for place, ledger in (("laptop", here), ("cluster", there))
    }
    pods = {each["instance"] for each in there}
    print(json.dumps({**figures, "pods": sorted(pods)}))
    assert len(pods) == len(STAGES), "each pod starts once"
    assert slot_seconds(there) <= 1.3 * slot_seconds(here)
    same = hashlib.sha256((folder / name / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert weights_of(storage, root) == same
    jobs.delete(name)


def seconds_in(ledger: list[dict[str, Any]], state: str) -> float:
    return float(sum(each["end"] - each["start"] for each in ledger if each["state"] == state))


def slot_seconds(ledger: list[dict[str, Any]]) -> float:
    """Seconds for which a GPU was held by a pod that was awake, or on its way to be."""
    return sum(seconds_in(ledger, state) for state in ("busy", "idle", "switching"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", ["operator", "awake", "asleep", "claim"])
def test_a_kill_changes_nothing(
    jobs: Jobs, kubectl: Kubectl, storage: Storage, undisturbed: str, victim: str, stage: str
) -> None:
    name = f"slots-{victim}-in-{stage}"
    root = f"/artifacts/runs/{name}"
    jobs.apply(short(name, **ONE_GPU))
    jobs.wait(name, f"in {stage} of the second step", in_stage(stage, storage, root), 400)
    now = ("--grace-period=0", "--force", "--ignore-not-found", "--wait=false")
    match victim:
        case "operator":
            kubectl("delete", "pods", "--selector=app.kubernetes.io/instance=rlhfless", *now)
        case "awake":
            kubectl("delete", "pods", f"--selector=rlhfless.io/job={name},rlhfless.io/stage={stage}", *now)
        case "asleep":
            kubectl("delete", "pods", f"--selector=rlhfless.io/job={name},rlhfless.io/stage!={stage}", *now)
        case _:
            kubectl("delete", "resourceclaim", CLAIM, "--wait=false")
    finish_as(undisturbed, jobs, storage, name, root)
