"""The quickstart with vLLM, from the image with vLLM for CPUs: one image for all three stages, as on GPUs."""

import json

from harness.chart import Chart
from harness.jobs import Jobs, quickstart
from harness.kubectl import Kubectl
from harness.storage import Storage

NAME = "quickstart-vllm"
ROOT = f"/artifacts/runs/{NAME}"
CACHE = "/artifacts/cache"
LEAST_ACCURACY = 0.85


def test_the_quickstart_learns_with_vllm(chart: Chart, kubectl: Kubectl, storage: Storage, vllm_image: str) -> None:
    jobs = Jobs(kubectl)
    job = quickstart(
        NAME,
        generation={"engine": "vllm", "keepAlive": "10m"},
        pods={"image": vllm_image, "env": {"RLHFLESS_CACHE": CACHE}},
    )
    jobs.apply(job)
    status = jobs.wait_succeeded(NAME, 3000)
    assert status["step"] == job["spec"]["steps"]

    summary = json.loads(storage.read(f"{ROOT}/summary.json"))
    print(json.dumps(summary))
    assert summary["accuracy_after"] >= LEAST_ACCURACY
    # What vLLM learnt of the model is kept for the next pod, by user 65532 on a read-only root.
    assert "vllm" in storage.run("ls", CACHE).split()
    jobs.delete(NAME)
