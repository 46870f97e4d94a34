"""Artifacts in an object store, which is killed in every stage; the weights are those of a run on a volume."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from harness.audit import Replayer, prompts_of
from harness.chart import Chart
from harness.images import Images
from harness.jobs import KEPT, Jobs, finish_as, in_stage, short, weights_of
from harness.kubectl import Kubectl
from harness.object_store import BUCKET, NAME, ObjectStore
from harness.storage import Storage
from rlhfless_functions.api import STAGES

OUTAGE_SECONDS = 10
AHEAD: dict[str, Any] = {
    **KEPT,
    "async": {"maxStaleness": 1},
    "checkpoints": {"keepRollouts": True, "everySteps": 2},
}
AHEAD_STEPS = 5
LARGER = {"promptsPerStep": 192, "samplesPerPrompt": 8, "minibatchSamples": 384, "microbatchTokens": 16384}
"""A step's generation takes longer than a pod takes to start. Else one that is there before does all of it."""


@pytest.fixture(scope="module")
def store(undisturbed: str, chart: Chart, kubectl: Kubectl, storage: Storage, images: Images) -> Iterator[ObjectStore]:
    """The store, with the chart configured for it once the undisturbed run on a volume is over."""
    store = ObjectStore(kubectl, storage, images.functions)
    store.create()
    chart.install(artifacts={"uri": f"s3://{BUCKET}/jobs", "secrets": [NAME]})
    yield store
    chart.install()


@pytest.mark.parametrize("stage", STAGES)
def test_an_outage_changes_nothing(
    kubectl: Kubectl, storage: Storage, store: ObjectStore, undisturbed: str, stage: str
) -> None:
    name, jobs = f"outage-in-{stage}", Jobs(kubectl)
    root = store.job(name)
    jobs.apply(short(name, **KEPT))
    jobs.wait(name, f"in {stage} of the second step", in_stage(stage, storage, root), 400)
    store.kill(OUTAGE_SECONDS)
    finish_as(undisturbed, jobs, storage, name, root)


def test_an_asynchronous_job_loses_and_doubles_nothing_in_outages(
    kubectl: Kubectl, storage: Storage, store: ObjectStore, replayer: Replayer
) -> None:
    jobs = Jobs(kubectl)
    learnt = {}
    for name, outages in (("ahead-undisturbed", ()), ("ahead", (1, 3))):
        jobs.apply(short(name, steps=AHEAD_STEPS, **AHEAD))
        for done in outages:
            jobs.wait(name, f"step {done} is done", lambda status, done=done: status.get("step", 0) >= done, 600)
            store.kill(OUTAGE_SECONDS)
        jobs.wait_succeeded(name, 900)
        learnt[name] = prompts_of(storage, store.job(name), steps=AHEAD_STEPS, staleness=1)
        jobs.delete(name)
    assert learnt["ahead"] == learnt["ahead-undisturbed"]
    assert "the same weights bit for bit" in replayer.replay(f"s3://{BUCKET}/jobs/{kubectl.namespace}/runs/ahead")


@pytest.fixture(scope="module")
def without_relays(kubectl: Kubectl, storage: Storage, store: ObjectStore) -> str:
    """Checksum of the weights of a longer job in which every instance reads the store."""
    jobs = Jobs(kubectl)
    jobs.apply(short("no-relays", **KEPT, batch=LARGER))
    jobs.wait_succeeded("no-relays", 900)
    jobs.delete("no-relays")
    return weights_of(storage, store.job("no-relays"))


@pytest.mark.parametrize(("name", "keep_alive"), [("relays", "5m"), ("relays-of-new-pods", "0s")])
def test_instances_pass_new_weights_on_to_each_other(
    kubectl: Kubectl, storage: Storage, store: ObjectStore, without_relays: str, name: str, keep_alive: str
) -> None:
    jobs = Jobs(kubectl)
    root = store.job(name)
    relayed = {**KEPT["generation"], "keepAlive": keep_alive, "weightRelays": "auto"}
    jobs.apply(short(name, generation=relayed, batch=LARGER))
    policies = kubectl("get", "networkpolicies", f"--selector=rlhfless.io/job={name}", "--output=name")
    finish_as(without_relays, jobs, storage, name, root)
    lines = storage.read(f"{root}/metrics.jsonl").splitlines()
    steps = [
        {metric: value for metric, value in json.loads(line)["metrics"].items() if metric.startswith("weights/")}
        for line in lines
    ]
    assert sum(step.get("weights/bytes_relayed", 0.0) for step in steps) > 0, steps
    assert sum(step.get("weights/relays_refused", 0.0) for step in steps) == 0, (policies, steps)
