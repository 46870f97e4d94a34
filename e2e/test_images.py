"""The images alone: functions in restricted pods behind Knative do one training step, asked by hand."""

import json
from pathlib import Path

from harness.by_hand import LABELS, RESTRICTED, functions_by_hand
from harness.images import Images
from harness.kubectl import Kubectl
from harness.storage import Storage
from rlhfless_functions.api import STAGES

DRIVE_STEP = Path(__file__).parent / "harness" / "drive_step.py"


def test_every_function_does_its_task_in_a_restricted_pod(kubectl: Kubectl, storage: Storage, images: Images) -> None:
    with functions_by_hand(kubectl, images, STAGES) as functions:
        said = functions.drive(DRIVE_STEP)

        print(said)
        tasks = {line["task"]: line for line in map(json.loads, said.splitlines())}
        assert list(tasks) == ["materialize", "generate", "prepare", "learn"]
        assert tasks["materialize"]["result"]["prompts"] == 256
        assert tasks["generate"]["result"]["finished"] == 32
        assert len(tasks["prepare"]["result"]["groups"]) == 4
        assert all(group["reward"] is not None for group in tasks["prepare"]["result"]["groups"])
        weights = tasks["learn"]["result"]["weights"]
        assert weights["version"] == 1
        assert "model.safetensors" in storage.run("ls", weights["uri"])

        assert {name_of_service(line["instance"]) for line in tasks.values()} == set(functions.names)
        for task in ("materialize", "generate", "learn"):
            assert tasks[task]["cold_start"]["process"] > 0
        templates = [each["spec"]["template"]["spec"] for each in kubectl.list("deployments.apps", **LABELS)]
        assert len(templates) == len(functions.names)
        for template in templates:
            [container] = [each for each in template["containers"] if each["name"] != "queue-proxy"]
            assert RESTRICTED.items() <= container["securityContext"].items()
            assert template["automountServiceAccountToken"] is False

        kubectl.wait_for_pods(0, 240, **LABELS)


def name_of_service(pod: str) -> str:
    """The Knative Service of a pod's first revision."""
    return pod.partition("-00001-deployment-")[0]
