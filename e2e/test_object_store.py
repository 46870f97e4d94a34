"""Artifacts in an object store, which is killed in every stage; the weights are those of a run on a volume."""

from collections.abc import Iterator

import pytest

from harness.chart import Chart
from harness.images import Images
from harness.jobs import Jobs, in_stage, short, steps_of, weights_of
from harness.kubectl import Kubectl
from harness.object_store import BUCKET, NAME, ObjectStore
from harness.storage import Storage

STEPS = 3
OUTAGE_SECONDS = 10
KEPT = {"generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "5m"}}
STAGES = ("generation", "preparation", "learning")


@pytest.fixture(scope="module")
def on_a_volume(chart: Chart, kubectl: Kubectl, storage: Storage) -> str:
    """Checksum of the weights of the same job, with its artifacts on a volume."""
    jobs = Jobs(kubectl)
    jobs.apply(short("on-a-volume", steps=STEPS, **KEPT))
    jobs.wait_succeeded("on-a-volume", 600)
    jobs.delete("on-a-volume")
    return weights_of(storage, "/artifacts/runs/on-a-volume")


@pytest.fixture(scope="module")
def store(on_a_volume: str, chart: Chart, kubectl: Kubectl, storage: Storage, images: Images) -> Iterator[ObjectStore]:
    """The store, with the chart configured for it."""
    store = ObjectStore(kubectl, storage, images.functions)
    store.create()
    chart.install(artifacts={"uri": f"s3://{BUCKET}/jobs", "secrets": [NAME]})
    yield store
    chart.install()


@pytest.mark.parametrize("stage", STAGES)
def test_an_outage_changes_nothing(
    kubectl: Kubectl, storage: Storage, store: ObjectStore, on_a_volume: str, stage: str
) -> None:
    name, jobs = f"outage-in-{stage}", Jobs(kubectl)
    root = store.path(f"jobs/runs/{name}")
    jobs.apply(short(name, steps=STEPS, **KEPT))
    jobs.wait(name, f"in {stage} of the second step", in_stage(stage, storage, root), 400)
    store.kill(OUTAGE_SECONDS)
    assert jobs.wait_succeeded(name, 600)["step"] == STEPS
    assert weights_of(storage, root) == on_a_volume
    assert steps_of(storage, root) == list(range(1, STEPS + 1))
    jobs.delete(name)
