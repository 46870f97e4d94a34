"""The Knative feature flags that a function's pods need. Knative refuses a pod field whose flag is off."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_FIELDS = {
    "affinity": "podspec-affinity",
    "dnsConfig": "podspec-dnsconfig",
    "dnsPolicy": "podspec-dnspolicy",
    "hostAliases": "podspec-hostaliases",
    "hostIPC": "podspec-hostipc",
    "hostNetwork": "podspec-hostnetwork",
    "hostPID": "podspec-hostpid",
    "initContainers": "podspec-init-containers",
    "nodeSelector": "podspec-nodeselector",
    "priorityClassName": "podspec-priorityclassname",
    "runtimeClassName": "podspec-runtimeclassname",
    "schedulerName": "podspec-schedulername",
    "securityContext": "podspec-securitycontext",
    "shareProcessNamespace": "podspec-shareprocessnamespace",
    "tolerations": "podspec-tolerations",
    "topologySpreadConstraints": "podspec-topologyspreadconstraints",
}
_VOLUMES = {
    "csi": "podspec-volumes-csi",
    "emptyDir": "podspec-volumes-emptydir",
    "hostPath": "podspec-volumes-hostpath",
    "image": "podspec-volumes-image",
    "persistentVolumeClaim": "podspec-persistent-volume-claim",
}
_WRITABLE_CLAIM = "podspec-persistent-volume-write"
_FIELD_REFERENCE = "podspec-fieldref"
_CAPABILITIES = "containerspec-addcapabilities"
_ON_BY_DEFAULT = frozenset({"kubernetes.podspec-volumes-emptydir"})


def wanted_features(pod_specs: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the flags that pods need, each with the first field that needs it.

    Args:
        pod_specs: as in a Knative Service's `spec.template.spec`.
    """
    wanted: dict[str, str] = {}
    for spec in pod_specs:
        for flag, field in _flags(spec):
            wanted.setdefault(f"kubernetes.{flag}", field)
    return wanted


def missing_features(wanted: Mapping[str, str], features: Mapping[str, str]) -> dict[str, str]:
    """Return the wanted flags that are off.

    Args:
        features: data of Knative's `config-features`.
    """
    return {flag: field for flag, field in wanted.items() if not _is_on(flag, features)}


def _is_on(flag: str, features: Mapping[str, str]) -> bool:
    value = features.get(flag, "enabled" if flag in _ON_BY_DEFAULT else "disabled")
    return value.strip().lower() in ("enabled", "allowed")


def _flags(spec: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for field, flag in _FIELDS.items():
        if spec.get(field):
            yield flag, field
    for volume in spec.get("volumes") or []:
        for kind, flag in _VOLUMES.items():
            if kind in volume:
                yield flag, f"volumes: {volume.get('name')} is a {kind}"
        claim = volume.get("persistentVolumeClaim")
        if claim is not None and not claim.get("readOnly"):
            yield _WRITABLE_CLAIM, f"volumes: {volume.get('name')} is writable"
    containers: Sequence[Mapping[str, Any]] = [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]
    for container in containers:
        for variable in container.get("env") or []:
            if {"fieldRef", "resourceFieldRef"} & set(variable.get("valueFrom") or {}):
                yield _FIELD_REFERENCE, f"env: {variable.get('name')}"
        if ((container.get("securityContext") or {}).get("capabilities") or {}).get("add"):
            yield _CAPABILITIES, "securityContext.capabilities.add"
