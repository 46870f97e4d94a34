"""Functions of a job that no operator drives. A script in the operator's image asks them, from inside the cluster."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.images import Images
from harness.kubectl import Kubectl
from harness.storage import USER
from rlhfless_functions.api import Stage
from rlhfless_operator.job.pods import PodsSpec, VolumeSpec
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods import manifests

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


@dataclass(frozen=True)
class FunctionsByHand:
    """The functions."""

    kubectl: Kubectl
    names: Sequence[str]
    """Names of their Services, by stage."""
    root: str
    """Folder of the job."""
    token: str

    def hold(self, name: str) -> None:
        """Keep one pod of a Service, as the operator does while a stage works."""
        self.kubectl("annotate", f"revision/{name}-00001", f"{manifests.MIN_SCALE}=1", "--overwrite")

    def drive(self, script: Path) -> str:
        """Run a script with the quickstart's file, the folder, the Services' address and the token; its output."""
        services = f"http://{JOB}-{{stage}}.{self.kubectl.namespace}.svc.cluster.local"
        return self.kubectl(
            *("exec", "--stdin", "operator", "--"),
            *("python", "-", "/files/grpo.yaml", self.root, services, self.token),
            given=script.read_text(),
        )


@contextmanager
def functions_by_hand(kubectl: Kubectl, images: Images, stages: Sequence[Stage]) -> Iterator[FunctionsByHand]:
    """The functions of these stages, until this is left. Other tests wait until there is no service of any job."""
    token = secrets.token_urlsafe(16)
    job = manifests.JobIdentity(kubectl.namespace, JOB, uid="", api_version="", kind="")
    root = f"/artifacts/{JOB}"
    functions = [manifests.StageFunction(job, stage, PODS, root) for stage in stages]
    settings = ClusterSettings(functions_image=images.functions)
    services = [manifests.service(function, settings) for function in functions]
    try:
        owned = [manifests.token_secret(job, token), *services]
        kubectl.apply(*map(without_owner, owned), operator_pod(images.operator))
        for function in functions:
            kubectl.wait_until(
                f"{function.name} is ready",
                lambda name=function.name: is_ready(kubectl.get("services.serving.knative.dev", name)),
                60,
            )
        kubectl("wait", "pod/operator", "--for=condition=Ready", f"--timeout={int(60 * kubectl.patience)}s")
        yield FunctionsByHand(kubectl, [function.name for function in functions], root, token)
    finally:
        kubectl("delete", "services.serving.knative.dev,secrets", f"--selector=rlhfless.io/job={JOB}")
        kubectl("delete", "pod/operator", "--ignore-not-found")


def without_owner(manifest: dict[str, Any]) -> dict[str, Any]:
    """A manifest of a job that is not there: the cluster would collect what names it as its owner."""
    metadata = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
    return manifest | {"metadata": metadata}


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
