"""What the operator and the network take between two stages, while all pods run: printed, and kept in a file."""

import json
import os
from pathlib import Path

from harness.chart import Chart
from harness.jobs import Jobs, short
from harness.kubectl import Kubectl

STEPS = 40
KEPT = {"keepAlive": "5m"}
METRIC = "rlhfless_control_seconds"


def test_overhead_between_stages(chart: Chart, kubectl: Kubectl) -> None:
    jobs = Jobs(kubectl)
    instances = {"instances": {"min": 2, "max": 2}}
    before = buckets(kubectl)
    jobs.apply(short("kept", steps=STEPS, generation=KEPT | instances, preparation=KEPT, learning=KEPT))
    status = jobs.wait_succeeded("kept", 900)
    after = buckets(kubectl)
    jobs.delete("kept")
    counts = {limit: count - before.get(limit, 0.0) for limit, count in after.items()}
    total = counts["+Inf"]
    assert total >= STEPS
    result = {
        "steps": STEPS,
        "seconds_per_step": sorted(step["seconds"] for step in status["recentSteps"])[len(status["recentSteps"]) // 2],
        "changes_of_stage": total,
        "share_within_seconds": {limit: round(count / total, 4) for limit, count in counts.items()},
    }
    print(json.dumps(result))
    if file := os.environ.get("RLHFLESS_E2E_OVERHEAD_FILE"):
        Path(file).write_text(json.dumps(result, indent=2) + "\n")


def buckets(kubectl: Kubectl) -> dict[str, float]:
    """The histogram, summed over the operator's replicas: how many changes of stage took no longer than each limit."""
    found: dict[str, float] = {}
    for pod in kubectl.list("pods", **{"app.kubernetes.io__instance": "rlhfless"}):
        if "deletionTimestamp" in pod["metadata"]:
            continue
        name = pod["metadata"]["name"]
        text = kubectl("get", "--raw", f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}:9090/proxy/metrics")
        for line in text.splitlines():
            if line.startswith(f"{METRIC}_bucket"):
                limit, value = line.split('le="')[1].split('"} ')
                found[limit] = found.get(limit, 0.0) + float(value)
    return found
