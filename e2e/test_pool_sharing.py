"""Three jobs on a pool of four GPUs: one after the other, together with whole GPUs, and together in turns (claims).

Once quickstarts, whose GPUs are threads of the cluster's machines: work on a GPU takes CPU time there, and jobs that
share GPUs share cores. And once rehearsals: pods, starts, requests and turns are as real, and work on a GPU
takes time alone.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.machine import describe_machine
from harness.chart import Chart
from harness.cpu_seconds import CpuSeconds
from harness.jobs import Jobs, quickstart, steps_of, weights_of
from harness.kubectl import Kubectl
from harness.options import Options
from harness.storage import Storage
from rlhfless_operator.simulator.scenarios import find_scenario
from rlhfless_operator.simulator.traces import write_trace
from rlhfless_operator.training.journal.ledger import CHARGED_STATES
from tests.prerequisites import needs_claims

GPUS = 4
"""Of the pool: as many as the pods of one job. What they are is made up; each has a thread of the machine."""
ONE_GPU = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
STEPS = 8
REHEARSED_STEPS = 4
COUNT = 3
SCENARIO = replace(find_scenario("paper-3b-gsm8k-grpo"), prompts_per_step=16, epochs=3)
TRACE = "/files/trace/lengths.parquet"


MakeJob = Callable[[str], dict[str, Any]]


def trained(name: str) -> dict[str, Any]:
    """A quickstart of a few steps."""
    return quickstart(name, steps=STEPS, pods=ONE_GPU)


def rehearsed(name: str) -> dict[str, Any]:
    """GRPO on Qwen2.5-3B and L40S, in half of their time. A pod's start takes what it does here, and 10 s more."""
    return {
        "apiVersion": "rlhfless.io/v1alpha1",
        "kind": "RLHFJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"source": SCENARIO.model.name},
            "data": {"source": "/files/train.jsonl"},
            "rewards": [{"name": "right", "math": {}}],
            "algorithm": {"name": "grpo", "kl": {"coefficient": 0.001}},
            "sampling": {"maxPromptTokens": 4096, "maxResponseTokens": SCENARIO.lengths.longest},
            "batch": {"promptsPerStep": SCENARIO.prompts_per_step, "samplesPerPrompt": SCENARIO.samples_per_prompt},
            "steps": REHEARSED_STEPS,
            "pods": ONE_GPU,
            "rehearsal": {"trace": TRACE, "gpu": SCENARIO.gpu.name, "startup": "20s", "timeScale": 0.5},
        },
    }


@pytest.fixture(scope="module")
def trace(storage: Storage, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Lengths for `rehearsed`, where its pods find them."""
    folder = tmp_path_factory.mktemp("trace")
    write_trace(folder / Path(TRACE).name, SCENARIO.draw_trace(seed=0))
    storage.put(folder, str(Path(TRACE).parent))


@pytest.fixture(scope="module")
def sequence(chart: Chart, kubectl: Kubectl, storage: Storage) -> dict[str, Any]:
    """Quickstarts, each applied when the one before has succeeded."""
    chart.install(pools={"default": {"gpus": GPUS}})
    return measured("one after the other", trained, one_by_one("alone"), kubectl, storage)


def test_together_they_start_no_more_pods_than_one_after_the_other(
    sequence: dict[str, Any], kubectl: Kubectl, storage: Storage
) -> None:
    together = measured("together", trained, [names_of("whole")], kubectl, storage)
    assert set(together["weights"].values()) == set(sequence["weights"].values())
    assert len(set(together["weights"].values())) == 1
    # The seconds are in the figures: they depend on what else the machine does.
    assert together["pods"] <= sequence["pods"]


@needs_claims("jobs in turns are not compared with one after the other")
def test_in_turns_they_come_to_the_same(
    sequence: dict[str, Any], chart: Chart, kubectl: Kubectl, storage: Storage, options: Options
) -> None:
    chart.install(pools={"default": {"gpus": GPUS, "deviceClass": options.device_class}})
    turns = measured("in turns", trained, [names_of("turns")], kubectl, storage)
    assert set(turns["weights"].values()) == set(sequence["weights"].values())


@needs_claims("rehearsals in turns are not compared with one after the other")
@pytest.mark.usefixtures("trace")
def test_rehearsals_in_turns_take_all_steps(chart: Chart, kubectl: Kubectl, storage: Storage, options: Options) -> None:
    chart.install(pools={"default": {"gpus": GPUS}})
    measured("rehearsed, one after the other", rehearsed, one_by_one("rehearsed-alone"), kubectl, storage)
    chart.install(pools={"default": {"gpus": GPUS, "deviceClass": options.device_class}})
    names = names_of("rehearsed-turns")
    measured("rehearsed, in turns", rehearsed, [names], kubectl, storage)
    for name in names:
        assert steps_of(storage, storage.job(name)) == list(range(1, REHEARSED_STEPS + 1))


def names_of(prefix: str) -> list[str]:
    """Of the jobs."""
    return [f"{prefix}-{number}" for number in range(COUNT)]


def one_by_one(prefix: str) -> list[list[str]]:
    """Each job is a batch."""
    return [[name] for name in names_of(prefix)]


def measured(
    how: str, make: MakeJob, batches: Sequence[Sequence[str]], kubectl: Kubectl, storage: Storage
) -> dict[str, Any]:
    """Run jobs, a batch when the one before has succeeded; the figures are printed, and kept where
    RLHFLESS_E2E_SHARING_FILE says."""
    jobs = Jobs(kubectl)
    began, ends = time.monotonic(), {}
    with CpuSeconds(kubectl) as used:
        for batch in batches:
            for name in batch:
                jobs.apply(make(name))
            for name in batch:
                jobs.wait_succeeded(name, 1200)
                ends[name] = round(time.monotonic() - began, 1)
    names = [name for batch in batches for name in batch]
    spans: dict[str, list[dict[str, Any]]] = {
        name: [json.loads(line) for line in storage.read(f"{storage.job(name)}/ledger.jsonl").splitlines()]
        for name in names
    }
    account = dict.fromkeys(CHARGED_STATES, 0.0)
    for span in (span for each in spans.values() for span in each):
        if span["state"] in account:
            account[span["state"]] += span["end"] - span["start"]
    figures = {
        "seconds": max(ends.values()),
        "ends": ends,
        "cpu_seconds": used.figures(),
        "instance_seconds": {state: round(seconds, 1) for state, seconds in account.items()},
        "pods": len({span["instance"] for each in spans.values() for span in each}),
    }
    if make is trained:
        figures["weights"] = {name: weights_of(storage, storage.job(name)) for name in names}
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
