"""Mounts of the artifact store's volume: a pod gets only its namespace's folder, whatever its job's document says."""

from typing import Any

from rlhfless_operator.errors import UserError
from rlhfless_operator.platforms.cluster_settings import ClusterSettings


class ForeignFoldersError(UserError):
    """A job's pods would mount folders of the artifact store that are not its namespace's."""


def check_store_mounts(
    manifest: dict[str, Any], settings: ClusterSettings, namespace: str, field: str = "spec.pods"
) -> None:
    """Check the mounts of a finished Knative Service. A job's template may have replaced any of them.

    Args:
        field: path of the pods in the job's document.

    Raises:
        ForeignFoldersError: a container mounts more of the store's claim than its namespace's folder.
    """
    claim = settings.store_claim
    if claim is None or settings.artifacts_claim == "separate":
        return
    pod = manifest["spec"]["template"]["spec"]
    names = {volume.get("name") for volume in _mappings(pod.get("volumes")) if _claim_of(volume) == claim}
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in _mappings(pod.get(kind)):
            devices = {device.get("name") for device in _mappings(container.get("volumeDevices"))}
            mounts = [mount for mount in _mappings(container.get("volumeMounts")) if mount.get("name") in names]
            if names & devices or not all(_is_own(mount, namespace) for mount in mounts):
                raise ForeignFoldersError(
                    f"{field}: the claim {claim} holds the artifacts of all namespaces; mount only the folder"
                    f" {namespace} of it, by subPath: {namespace}, or remove the mount"
                )


def _is_own(mount: dict[str, Any], namespace: str) -> bool:
    parts = str(mount.get("subPath") or "").split("/")
    return parts[0] == namespace and ".." not in parts and not mount.get("subPathExpr")


def _claim_of(volume: dict[str, Any]) -> Any:
    source = volume.get("persistentVolumeClaim")
    return source.get("claimName") if isinstance(source, dict) else None


def _mappings(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
