"""The settings that jobs need in Knative's ConfigMaps, key by key."""

import re
from collections.abc import Iterable, Mapping

from rlhfless_operator.preflight.features import missing_features

LONGEST_REQUEST_SECONDS = 43200
"""Longest request if the setting is missing, in seconds: half a day is longer than a learning step, or an actor's share
of one. The operator's own limit is `knative.requestTimeout` of the chart."""
_KNATIVE_REQUEST_SECONDS = 600.0
"""Knative's own default."""
_TIMEOUT = "max-revision-timeout-seconds"
USUAL_FEATURES = (
    "kubernetes.podspec-affinity",
    "kubernetes.podspec-nodeselector",
    "kubernetes.podspec-persistent-volume-claim",
    "kubernetes.podspec-persistent-volume-write",
    "kubernetes.podspec-priorityclassname",
    "kubernetes.podspec-runtimeclassname",
    "kubernetes.podspec-tolerations",
)
"""Flags of pod fields that jobs use on clusters with GPUs."""


def autoscaler_changes(data: Mapping[str, str], initial_scale: int) -> dict[str, str]:
    """Return the settings that `config-autoscaler` lacks for functions to start with no pods and scale to zero."""
    changes = {}
    if value_of(data, "enable-scale-to-zero", "true") != "true":
        changes["enable-scale-to-zero"] = "true"
    if initial_scale == 0 and value_of(data, "allow-zero-initial-scale", "false") != "true":
        changes["allow-zero-initial-scale"] = "true"
    return changes


def deployment_changes(data: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that `config-deployment` lacks for pods to wait for nodes and share them."""
    changes = {}
    if value_of(data, "pod-is-always-schedulable", "false") != "true":
        changes["pod-is-always-schedulable"] = "true"
    if value_of(data, "default-affinity-type", "PreferSpreadRevisionOverNodes").lower() != "none":
        changes["default-affinity-type"] = "none"
    return changes


def longest_request(data: Mapping[str, str]) -> float:
    """Return the longest request that `config-defaults` allows, in seconds."""
    text = value_of(data, _TIMEOUT, "")
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else _KNATIVE_REQUEST_SECONDS


def defaults_changes(data: Mapping[str, str], request_timeout: float) -> dict[str, str]:
    """Return the settings that `config-defaults` lacks for long requests. Existing values stay if they are large
    enough.

    Args:
        request_timeout: longest request that the operator makes, in seconds.
    """
    if _TIMEOUT in data and longest_request(data) >= request_timeout:
        return {}
    return {_TIMEOUT: f"{max(LONGEST_REQUEST_SECONDS, int(request_timeout))}"}


def features_changes(data: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """Return the flags that `config-features` lacks: the wanted ones, and those that jobs usually need, unless they are
    set.

    Args:
        wanted: flags that pods need, from `wanted_features`.
    """
    flags: Iterable[str] = [*(flag for flag in USUAL_FEATURES if flag not in data), *missing_features(wanted, data)]
    return dict.fromkeys(sorted(flags), "enabled")


def value_of(data: Mapping[str, str], key: str, default: str) -> str:
    """Return a key's value, without quotes."""
    return data.get(key, default).strip().strip('"')
