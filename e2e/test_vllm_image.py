"""The quickstart with vLLM, from the image with vLLM for CPUs: one image for all three stages, as on GPUs."""

import json
from collections.abc import Iterator

import pytest

from harness.chart import Chart
from harness.jobs import Jobs, quickstart
from harness.kubectl import Kubectl
from harness.storage import Storage

NAME = "quickstart-vllm"
LEAST_ACCURACY = 0.85


@pytest.fixture
def caching(chart: Chart) -> Iterator[Chart]:
    """The chart with a cache that function pods share."""
    chart.install(cache={"existingClaim": "cache"})
    yield chart
    chart.install()


def test_the_quickstart_learns_with_vllm(caching: Chart, kubectl: Kubectl, storage: Storage, vllm_image: str) -> None:
    jobs = Jobs(kubectl)
    job = quickstart(NAME, generation={"engine": "vllm", "keepAlive": "10m"}, pods={"image": vllm_image})
    jobs.apply(job)
    status = jobs.wait_succeeded(NAME, 3000)
    assert status["step"] == job["spec"]["steps"]

    summary = json.loads(storage.read(f"{storage.job(NAME)}/summary.json"))
    print(json.dumps(summary))
    assert summary["held_out_reward_after"] >= LEAST_ACCURACY
    # What vLLM found out about the model stays for the next pod; the pods' root is read only, and their user not root.
    assert storage.run("ls", "/cache/vllm/modelinfos").strip()
    jobs.delete(NAME)
