"""Three jobs on a pool of four GPUs: one after the other, together with whole GPUs, and together in turns (claims)."""

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from benchmarks.machine import describe_machine

from harness.chart import Chart
from harness.jobs import Jobs, quickstart, weights_of
from harness.kubectl import Kubectl
from harness.options import Options
from harness.storage import Storage
from rlhfless_operator.training.ledger import CHARGED_STATES
from tests.prerequisites import needs_claims

GPUS = 4
"""Of the pool: as many as the pods of one job. What they are is made up; each has a thread of the machine."""
ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
STEPS = 8
COUNT = 3


@pytest.fixture(scope="module")
def sequence(chart: Chart, kubectl: Kubectl, storage: Storage) -> dict[str, Any]:
    """The jobs, each applied when the one before has succeeded."""
    chart.install(pools={"default": {"gpus": GPUS}})
    return measured("one after the other", [[f"alone-{number}"] for number in range(COUNT)], kubectl, storage)


def test_together_they_start_no_more_pods_than_one_after_the_other(
    sequence: dict[str, Any], kubectl: Kubectl, storage: Storage
) -> None:
    together = measured("together", [[f"whole-{number}" for number in range(COUNT)]], kubectl, storage)
    assert set(together["weights"].values()) == set(sequence["weights"].values())
    assert len(set(together["weights"].values())) == 1
    # The seconds are in the figures: they depend on what else the machine does.
    assert together["pods"] <= sequence["pods"]


@needs_claims("jobs in turns are not compared with one after the other")
def test_in_turns_they_come_to_the_same(
    sequence: dict[str, Any], chart: Chart, kubectl: Kubectl, storage: Storage, options: Options
) -> None:
    chart.install(pools={"default": {"gpus": GPUS, "deviceClass": options.device_class}})
    turns = measured("in turns", [[f"turns-{number}" for number in range(COUNT)]], kubectl, storage)
    assert set(turns["weights"].values()) == set(sequence["weights"].values())


def measured(how: str, batches: Sequence[Sequence[str]], kubectl: Kubectl, storage: Storage) -> dict[str, Any]:
    """Run jobs, a batch when the one before has succeeded; the figures are printed, and kept where
    RLHFLESS_E2E_SHARING_FILE says."""
    jobs = Jobs(kubectl)
    began, ends = time.monotonic(), {}
    for batch in batches:
        for name in batch:
            jobs.apply(quickstart(name, steps=STEPS, pods=ONE_GPU))
        for name in batch:
            jobs.wait_succeeded(name, 1200)
            ends[name] = round(time.monotonic() - began, 1)
    names = [name for batch in batches for name in batch]
    spans: dict[str, list[dict[str, Any]]] = {
        name: [json.loads(line) for line in storage.read(f"/artifacts/runs/{name}/ledger.jsonl").splitlines()]
        for name in names
    }
    account = dict.fromkeys(CHARGED_STATES, 0.0)
    for span in (span for each in spans.values() for span in each):
        if span["state"] in account:
            account[span["state"]] += span["end"] - span["start"]
    figures = {
        "seconds": max(ends.values()),
        "ends": ends,
        "instance_seconds": {state: round(seconds, 1) for state, seconds in account.items()},
        "pods": len({span["instance"] for each in spans.values() for span in each}),
        "weights": {name: weights_of(storage, f"/artifacts/runs/{name}") for name in names},
    }
    for name in names:
        kubectl.wait_for_pods(0, 180, **{"rlhfless.io__job": name})
        jobs.delete(name)
    print(how, json.dumps(figures))
    keep(how, figures)
    return figures


def keep(how: str, figures: dict[str, Any]) -> None:
    """Add figures to the file that RLHFLESS_E2E_SHARING_FILE names."""
    if not (name := os.environ.get("RLHFLESS_E2E_SHARING_FILE")):
        return
    file = Path(name)
    runs = json.loads(file.read_text())["runs"] if file.exists() else {}
    answer = subprocess.run(["kubectl", "version", "--output=json"], capture_output=True, check=True)
    document = {
        "command": f"RLHFLESS_E2E_SHARING_FILE={name} make e2e E2E=e2e/test_pool_sharing.py",
        **describe_machine(("torch", "transformers")),
        "kubernetes": json.loads(answer.stdout)["serverVersion"]["gitVersion"],
        "runs": {**runs, how: figures},
    }
    file.write_text(json.dumps(document, indent=2) + "\n")
