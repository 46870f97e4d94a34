"""An S3 server in a pod. Its data are on the claim `artifacts`, so a test may kill the pod."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

from harness.kubectl import Kubectl
from harness.storage import MOUNTS, USER, VOLUMES, Storage

NAME = "object-store"
BUCKET = "jobs"
_FOLDER = "/artifacts/object-store"
_PROGRAM = "/files/bin/rclone"
_PORT = 9000
_KEY = ("rlhfless", "a-secret-of-the-tests")


class ObjectStore:
    """A Deployment of one pod, its Service, and the Secret with which it is reached.

    Args:
        storage: whose volumes the program and the objects are on.
        image: of any Linux; rclone is one static program.
    """

    def __init__(self, kubectl: Kubectl, storage: Storage, image: str) -> None:
        self._kubectl = kubectl
        self._storage = storage
        self._image = image

    def create(self) -> None:
        """Start it with an empty bucket, and wait until it is ready."""
        program = shutil.which("rclone", path=str(Path(sys.executable).parent))
        assert program is not None, "rclone is not in this environment: pip install '.[dev]'"
        self._storage.run("mkdir", "-p", f"{_FOLDER}/{BUCKET}", str(Path(_PROGRAM).parent))
        self._storage.run("sh", "-c", f"cat > {_PROGRAM} && chmod 755 {_PROGRAM}", given=Path(program).read_bytes())
        self._storage.run("chown", "-R", f"{USER}:{USER}", _FOLDER)
        self._kubectl.apply(_secret(self._kubectl.namespace), _service(), _deployment(self._image))
        self._wait_until_ready()

    def kill(self, seconds: float) -> None:
        """Kill it, and have it come back after so many seconds."""
        self._kubectl("scale", f"deployment/{NAME}", "--replicas=0")
        self._kubectl("delete", "pods", f"--selector=app={NAME}", "--grace-period=0", "--force", "--ignore-not-found")
        time.sleep(seconds)
        self._kubectl("scale", f"deployment/{NAME}", "--replicas=1")
        self._wait_until_ready()

    def path(self, key: str) -> str:
        """Where an object is, for `Storage`."""
        return f"{_FOLDER}/{BUCKET}/{key}"

    def job(self, name: str) -> str:
        """A job's folder, for `Storage`, where the operator's base is the bucket's folder `jobs`."""
        return self.path(f"jobs/{self._kubectl.namespace}/runs/{name}")

    def _wait_until_ready(self) -> None:
        self._kubectl("rollout", "status", f"deployment/{NAME}", f"--timeout={int(120 * self._kubectl.patience)}s")


def _secret(namespace: str) -> dict[str, Any]:
    identity, secret = _KEY
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": NAME},
        "stringData": {
            "AWS_ACCESS_KEY_ID": identity,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_ENDPOINT_URL": f"http://{NAME}.{namespace}.svc.cluster.local:{_PORT}",
            "AWS_REGION": "us-east-1",
        },
    }


def _service() -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": NAME}, "ports": [{"port": _PORT}]},
    }


def _deployment(image: str) -> dict[str, Any]:
    command = [
        *(_PROGRAM, "serve", "s3", f"--addr=:{_PORT}", f"--auth-key={','.join(_KEY)}"),
        *("--config=/dev/null", "--cache-dir=/tmp", _FOLDER),
    ]
    container = {
        "name": "rclone",
        "image": image,
        "command": command,
        "securityContext": {"runAsUser": USER},
        "readinessProbe": {"tcpSocket": {"port": _PORT}, "periodSeconds": 1},
        "volumeMounts": MOUNTS,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": NAME},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": {"app": NAME}},
            "template": {
                "metadata": {"labels": {"app": NAME}},
                "spec": {"terminationGracePeriodSeconds": 0, "containers": [container], "volumes": VOLUMES},
            },
        },
    }
