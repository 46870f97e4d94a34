"""The changes of `rlhfless preflight --fix` to Knative's objects: pure functions of the fetched objects."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from rlhfless_operator.errors import UserError
from rlhfless_operator.preflight.knative_settings import (
    autoscaler_changes,
    defaults_changes,
    deployment_changes,
    features_changes,
    longest_request,
)

CONFIG_MAPS = ("autoscaler", "defaults", "deployment", "features")
"""Knative's ConfigMaps that are checked, without `config-`."""
ACTIVATOR = "activator"
_EXAMPLE = "_example"
"""A key in each of Knative's ConfigMaps that documents the settings and sets nothing."""
_OWNER = "KnativeServing"

KubernetesDocument = dict[str, Any]


class ManagedElsewhereError(UserError):
    """Another controller manages the objects and would undo a change."""


@dataclass(frozen=True)
class Patch:
    """A change to one object, as a merge patch."""

    kind: str
    """Kind of the object, such as `configmap`."""
    path: str
    """Path of the object on the API server."""
    body: KubernetesDocument
    """The merge patch. It names the object's version, and is refused if the object has changed since."""
    before: str
    """The checked part of the object, as YAML."""
    after: str
    """The same part after the patch."""

    @property
    def target(self) -> str:
        """The object, as kubectl names it."""
        return f"{self.kind}/{self.path.rsplit('/', 1)[-1]}"

    @property
    def diff(self) -> str:
        """The change, as a unified diff."""
        before, after = self.before.splitlines(), self.after.splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.target, f"{self.target} (fixed)", lineterm=""))


def config_map_path(namespace: str, name: str) -> str:
    """Return the API path of a ConfigMap."""
    return f"/api/v1/namespaces/{namespace}/configmaps/{name}"


def activator_path(namespace: str) -> str:
    """Return the API path of the Deployment of Knative's activator."""
    return f"/apis/apps/v1/namespaces/{namespace}/deployments/{ACTIVATOR}"


def patches(
    config_maps: Mapping[str, KubernetesDocument],
    activator: KubernetesDocument | None,
    *,
    namespace: str,
    initial_scale: int,
    request_timeout: float,
    features: Mapping[str, str],
) -> list[Patch]:
    """Return the changes that jobs need; empty if Knative is set up already.

    Args:
        config_maps: the ConfigMaps of `CONFIG_MAPS`, by these names.
        activator: the activator's Deployment; None if it could not be read.
        namespace: namespace of Knative Serving.
        initial_scale: pods that a function starts with.
        request_timeout: longest request that the operator makes, in seconds.
        features: flags of `config-features` that pods need, from `wanted_features`.

    Raises:
        ManagedElsewhereError: the Knative Operator manages the ConfigMaps; the message has the settings for it.
    """
    data = {name: dict(content.get("data") or {}) for name, content in config_maps.items()}
    changes = {
        "autoscaler": autoscaler_changes(data["autoscaler"], initial_scale),
        "defaults": defaults_changes(data["defaults"], request_timeout),
        "deployment": deployment_changes(data["deployment"]),
        "features": features_changes(data["features"], features),
    }
    changes = {name: change for name, change in changes.items() if change}
    _refuse_managed([config_maps[name] for name in changes], namespace, changes)
    found = [_of_config_map(config_maps[name], namespace, change) for name, change in changes.items()]
    longest = longest_request({**data["defaults"], **changes.get("defaults", {})})
    if activator is not None and (patch := _of_activator(activator, namespace, int(longest))) is not None:
        found.append(patch)
    return found


def _refuse_managed(
    changed: Sequence[KubernetesDocument], namespace: str, changes: Mapping[str, Mapping[str, str]]
) -> None:
    owners = {
        owner["name"]
        for content in changed
        for owner in content["metadata"].get("ownerReferences") or []
        if owner["kind"] == _OWNER
    }
    if owners:
        text = yaml.safe_dump({"spec": {"config": {name: dict(change) for name, change in changes.items()}}})
        raise ManagedElsewhereError(
            f"the Knative Operator manages these ConfigMaps and would undo a change; merge this into its"
            f" {_OWNER} object {', '.join(sorted(owners))} in namespace {namespace}:\n{text}"
        )


def _of_config_map(content: KubernetesDocument, namespace: str, change: dict[str, str]) -> Patch:
    data = {key: value for key, value in (content.get("data") or {}).items() if key != _EXAMPLE}
    return Patch(
        "configmap",
        config_map_path(namespace, content["metadata"]["name"]),
        {**_at_version(content), "data": change},
        _yaml({"data": data}),
        _yaml({"data": data | change}),
    )


def _of_activator(content: KubernetesDocument, namespace: str, seconds: int) -> Patch | None:
    """Let the activator live, when it terminates, until the longest request ends: requests pass through it."""
    key = "terminationGracePeriodSeconds"
    now = content["spec"]["template"]["spec"].get(key, 30)
    if now >= seconds:
        return None

    def grace(value: int) -> KubernetesDocument:
        return {"spec": {"template": {"spec": {key: value}}}}

    change = grace(seconds)
    return Patch(
        "deployment", activator_path(namespace), {**_at_version(content), **change}, _yaml(grace(now)), _yaml(change)
    )


def _at_version(content: KubernetesDocument) -> KubernetesDocument:
    return {"metadata": {"resourceVersion": content["metadata"]["resourceVersion"]}}


def _yaml(content: KubernetesDocument) -> str:
    text: str = yaml.safe_dump(content, sort_keys=True, width=1000, allow_unicode=True)
    return text
