"""The volumes of a test's namespace, and a pod through which the tests see into them.

Function pods write to a claim and never to a hostPath of their own: Knative mounts every volume but a claim (and an
emptyDir) read only. Without a storage class the claim is bound to a folder of the only node.
"""

import io
import tarfile
from pathlib import Path
from typing import Any

from harness.kubectl import Kubectl
from harness.options import Options

CLAIMS = ("artifacts", "files", "cache")
"""Each is mounted at `/NAME`."""
MOUNTS = [{"name": claim, "mountPath": f"/{claim}"} for claim in CLAIMS]
VOLUMES = [{"name": claim, "persistentVolumeClaim": {"claimName": claim}} for claim in CLAIMS]
"""What a pod of the namespace has to say to see them."""
USER = 65532
_POD = "storage"
_NODE_FOLDER = "/var/lib/rlhfless-e2e"
_SIZE = "10Gi"


class Storage:
    """The claims of a namespace.

    Args:
        image: an image with a shell, tar and Python.
    """

    def __init__(self, kubectl: Kubectl, options: Options, image: str) -> None:
        self._kubectl = kubectl
        self._options = options
        self._image = image

    def create(self) -> None:
        """Make the claims, give them to the functions' user, and wait until they can be used."""
        namespace = self._kubectl.namespace
        for claim in CLAIMS:
            if self._options.storage_class is None:
                self._kubectl.apply(_node_volume(namespace, claim))
            self._kubectl.apply(_claim(claim, self._options.storage_class or ""))
        self._kubectl.apply(_pod(self._image))
        self._kubectl("wait", f"pod/{_POD}", "--for=condition=Ready", f"--timeout={int(120 * self._kubectl.patience)}s")
        self.run("chown", f"{USER}:{USER}", *(f"/{claim}" for claim in CLAIMS))

    def remove(self) -> None:
        """Empty the volumes and let them go; the claims end with the namespace."""
        self.run("sh", "-c", " ".join(["rm -rf", *(f"/{claim}/*" for claim in CLAIMS)]))
        if self._options.storage_class is None:
            names = [f"{self._kubectl.namespace}-{claim}" for claim in CLAIMS]
            self._kubectl("delete", "persistentvolume", *names, "--wait=false")

    def lend(self, other: Kubectl) -> None:
        """Make claims in another namespace on the same folders of the node."""
        for claim in CLAIMS:
            other.apply(_node_volume(other.namespace, claim, of=self._kubectl.namespace), _claim(claim, ""))

    def take_back(self, other: Kubectl) -> None:
        """Remove the volumes of another namespace; the folders stay."""
        self._kubectl("delete", "persistentvolume", *(f"{other.namespace}-{each}" for each in CLAIMS), "--wait=false")

    def run(self, *command: str, given: bytes | None = None) -> str:
        """Run a command where the volumes are; its output."""
        stdin = ("--stdin",) if given is not None else ()
        return self._kubectl("exec", *stdin, _POD, "--", *command, given=given)

    def put(self, folder: Path, at: str) -> None:
        """Copy a local folder's content."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(folder, arcname=".", filter=_for_the_functions)
        self.run("mkdir", "-p", at)
        self.run("tar", "-x", "-C", at, given=packed.getvalue())

    def job(self, name: str) -> str:
        """A job's folder, with the default `artifacts.uri`."""
        return folder_of(self._kubectl.namespace, name)

    def read(self, path: str) -> str:
        """A file's text."""
        return self.run("cat", path)


def folder_of(namespace: str, name: str) -> str:
    """The folder of a job that does not say another one."""
    return f"/artifacts/{namespace}/runs/{name}"


def _for_the_functions(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = USER
    # A name would count for more than the number.
    info.uname = info.gname = ""
    return None if "__pycache__" in info.name else info


def _node_volume(namespace: str, claim: str, *, of: str | None = None) -> dict[str, Any]:
    """A volume for a namespace's claim, on the folder of this namespace or of another one."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{claim}"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "capacity": {"storage": _SIZE},
            "claimRef": {"namespace": namespace, "name": claim},
            "hostPath": {"path": f"{_NODE_FOLDER}/{of or namespace}/{claim}", "type": "DirectoryOrCreate"},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
        },
    }


def _claim(name: str, storage_class: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": _SIZE}},
            "storageClassName": storage_class,
        },
    }


def _pod(image: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": _POD},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [
                {
                    "name": "shell",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "securityContext": {"runAsUser": 0},
                    "volumeMounts": MOUNTS,
                }
            ],
            "volumes": VOLUMES,
        },
    }
