"""Pods that use GPUs in turns, by ResourceClaims: each starts once, one at a time is awake, weights are the same."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.jobs import ONE_GPU, QUICKSTART, STEPS, Jobs, finish_as, quickstart, reach, short, steps_of, weights_of
from harness.kubectl import Kubectl
from harness.storage import Storage
from harness.turns import AwakeSpans
from rlhfless_functions.api import STAGES
from tests.prerequisites import needs_claims

pytestmark = needs_claims("no GPU is used in turns")

CLAIM = "rlhfless-default-0-0"
CHARGED = ("starting", "busy", "idle", "switching", "draining")


def spans(storage: Storage, root: str) -> list[dict[str, Any]]:
    """A job's ledger."""
    return [json.loads(line) for line in storage.read(f"{root}/ledger.jsonl").splitlines()]


def test_three_pods_share_one_gpu(one_slot: Jobs, kubectl: Kubectl, storage: Storage, undisturbed: str) -> None:
    name, root = "one-slot", storage.job("one-slot")
    one_slot.apply(short(name, **ONE_GPU))
    awake = AwakeSpans(kubectl, name)

    def ended(status: dict[str, Any]) -> bool:
        awake.look()
        return status.get("phase") == "Succeeded"

    one_slot.wait(name, "succeeded", ended, 900)
    assert weights_of(storage, root) == undisturbed
    assert steps_of(storage, root) == list(range(1, STEPS + 1))
    assert sorted(pod["metadata"]["labels"]["rlhfless.io/stage"] for pod in awake.pods.values()) == sorted(STAGES)
    for pod in awake.pods.values():
        assert [each["resourceClaimName"] for each in pod["spec"]["resourceClaims"]] == [CLAIM]
        function, *_ = (each for each in pod["spec"]["containers"] if each["name"] == "function")
        assert function["resources"]["claims"] == [{"name": CLAIM}]
        assert "nvidia.com/gpu" not in function["resources"].get("limits", {})
    assert set(awake.spans) == set(awake.pods)
    awake.check()
    busy = [each for each in spans(storage, root) if each["state"] in ("busy", "idle", "switching")]
    moments = sorted({each["start"] for each in busy})
    most = max(sum(each["start"] <= moment < each["end"] for each in busy) for moment in moments)
    assert most == 1, "the ledger has two awake at once"
    one_slot.delete(name)


def test_the_quickstart_costs_what_it_does_on_a_machine_with_one_gpu(
    one_slot: Jobs, kubectl: Kubectl, storage: Storage, tmp_path: Path
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
    one_slot.apply(job)
    one_slot.wait_succeeded(name, 3000)
    root = storage.job(name)
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
    one_slot.delete(name)


def seconds_in(ledger: list[dict[str, Any]], state: str) -> float:
    return float(sum(each["end"] - each["start"] for each in ledger if each["state"] == state))


def slot_seconds(ledger: list[dict[str, Any]]) -> float:
    """Seconds for which a GPU was held by a pod that was awake, or on its way to be."""
    return sum(seconds_in(ledger, state) for state in ("busy", "idle", "switching"))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("victim", ["operator", "awake", "asleep", "claim"])
def test_a_kill_changes_nothing(
    one_slot: Jobs, kubectl: Kubectl, storage: Storage, undisturbed: str, victim: str, stage: str
) -> None:
    name = f"slots-{victim}-in-{stage}"
    root = reach(stage, one_slot, storage, short(name, **ONE_GPU))
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
    finish_as(undisturbed, one_slot, storage, name, root)
