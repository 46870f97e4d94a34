"""The images alone: functions in restricted pods behind Knative do one training step, asked by hand."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.images import Images
from harness.kubectl import Kubectl
from harness.storage import USER, Storage
from rlhfless_functions.api import STAGES
from rlhfless_operator.job.pods import PodsSpec, VolumeSpec
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods import manifests

DRIVE_STEP = Path(__file__).parent / "harness" / "drive_step.py"
JOB = "by-hand"
LABELS = {"rlhfless.io__job": JOB}
PODS = PodsSpec(
    volumes=[
        VolumeSpec(claim="artifacts", mount_path="/artifacts"),
        VolumeSpec(claim="files", mount_path="/files", read_only=True),
    ]
)
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(autouse=True)
def nothing_is_left(kubectl: Kubectl) -> Iterator[None]:
    """Other tests of this session wait until there is no service of any job."""
    yield
    kubectl("delete", "services.serving.knative.dev,secrets", f"--selector=rlhfless.io/job={JOB}")
    kubectl("delete", "pod/operator", "--ignore-not-found")


def test_every_function_does_its_task_in_a_restricted_pod(kubectl: Kubectl, storage: Storage, images: Images) -> None:
    token = secrets.token_urlsafe(16)
    job = manifests.JobIdentity(kubectl.namespace, JOB, uid="", api_version="", kind="")
    root = f"/artifacts/{JOB}"
    functions = [manifests.StageFunction(job, stage, PODS, root) for stage in STAGES]
    settings = ClusterSettings(functions_image=images.functions)
    kubectl.apply(
        *(
            without_owner(manifest)
            for manifest in (
                manifests.token_secret(job, token),
                *(manifests.service(function, settings) for function in functions),
            )
        ),
        operator_pod(images.operator),
    )
    for function in functions:
        kubectl.wait_until(
            f"{function.name} is ready",
            lambda name=function.name: is_ready(kubectl.get("services.serving.knative.dev", name)),
            60,
        )
    kubectl("wait", "pod/operator", "--for=condition=Ready", f"--timeout={int(60 * kubectl.patience)}s")

    services = f"http://{JOB}-{{stage}}.{kubectl.namespace}.svc.cluster.local"
    said = kubectl(
        *("exec", "--stdin", "operator", "--"),
        *("python", "-", "/files/grpo.yaml", root, services, token),
        given=DRIVE_STEP.read_text(),
    )

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

    assert {name_of_service(line["instance"]) for line in tasks.values()} == {each.name for each in functions}
    for task in ("materialize", "generate", "learn"):
        assert tasks[task]["cold_start"]["process"] > 0
    templates = [each["spec"]["template"]["spec"] for each in kubectl.list("deployments.apps", **LABELS)]
    assert len(templates) == len(functions)
    for template in templates:
        [container] = [each for each in template["containers"] if each["name"] != "queue-proxy"]
        assert RESTRICTED.items() <= container["securityContext"].items()
        assert template["automountServiceAccountToken"] is False

    kubectl.wait_for_pods(0, 240, **LABELS)


def without_owner(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest of a job that is not there: the cluster would collect what names it as its owner."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return manifest | {"metadata": metadata}


def name_of_service(pod: str) -> str:
    """The Knative Service of a pod's first revision."""
    return pod.partition("-00001-deployment-")[0]


def is_ready(service: dict[str, Any]) -> bool:
    conditions = service.get("status", {}).get("conditions", [])
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def operator_pod(image: str) -> dict[str, Any]:
    """The operator's image, as restricted as the functions', waiting to be told what to run."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator"},
        "spec": {
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "operator",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "securityContext": RESTRICTED,
                    "volumeMounts": [
                        {"name": "files", "mountPath": "/files", "readOnly": True},
                        {"name": "tmp", "mountPath": "/tmp"},
                    ],
                }
            ],
            "volumes": [
                {"name": "files", "persistentVolumeClaim": {"claimName": "files"}},
                {"name": "tmp", "emptyDir": {}},
            ],
        },
    }
