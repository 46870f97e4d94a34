"""The checks: pure functions of what was fetched from a cluster."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_operator.job.crd import NAME, VERSION
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.quantities import quantity
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.manifests import SlotsWanted
from rlhfless_operator.platforms.room import why_not_ahead
from rlhfless_operator.preflight.features import missing_features, wanted_features
from rlhfless_operator.preflight.findings import Finding, set_command
from rlhfless_operator.preflight.knative_settings import autoscaler_changes, deployment_changes, longest_request

OLDEST_KNATIVE = (1, 21)
"""The first release in which a Revision's scale annotations can be changed."""
_MODULE_OFFSET = 27
"""Knative 1.21 calls itself 0.48 where its modules' version is shown."""
_COMPUTE = re.compile(r"(?:(requests|limits)\.)?(cpu|memory)")


@dataclass(frozen=True)
class Knative:
    """Knative Serving as it is set up: the data of its ConfigMaps, and what its labels say of its version."""

    namespace: str
    version: str
    features: Mapping[str, str]
    autoscaler: Mapping[str, str]
    defaults: Mapping[str, str]
    deployment: Mapping[str, str]


@dataclass(frozen=True)
class StagePods:
    """The pods of one stage."""

    stage: str
    pods: PodsSpec
    most: int = 1
    """How many there may be at a time."""
    slots: SlotsWanted | None = None
    """What they use in turns, besides what `pods` ask for; None where they have GPUs of their own, or none."""


def check_options(job: RLHFJob | None, settings: ClusterSettings, namespace: str) -> list[Finding]:
    """What a job asks for that its pool can't do."""
    refusal = why_not_ahead(job, settings, namespace) if job is not None else None
    return [Finding("spec.async", "error", refusal)] if refusal is not None else []


def check_version(version: str) -> Finding:
    """Whether Knative is new enough.

    Args:
        version: such as `1.21.0` or, of its modules, `0.48.2`; empty if nothing says.
    """
    check, wanted = "knative/version", ".".join(str(part) for part in OLDEST_KNATIVE)
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        return Finding(check, "unknown", f"no label tells Knative's version; {wanted} or newer is needed")
    release = (int(found[1]), int(found[2]))
    if release[0] == 0:
        release = (1, release[1] - _MODULE_OFFSET)
    if release < OLDEST_KNATIVE:
        remedy = f"Upgrade Knative Serving to {wanted} or newer: older ones undo changes of a Revision's scale."
        return Finding(check, "error", f"Knative is {version}", remedy)
    return Finding(check, "ok", f"Knative is {version}")


def check_features(knative: Knative, pod_specs: Sequence[Mapping[str, Any]]) -> Finding:
    """Whether Knative lets pods be as they are to be.

    Args:
        pod_specs: as the Knative Services would have them.
    """
    wanted = wanted_features(pod_specs)
    missing = missing_features(wanted, knative.features)
    check = "knative/config-features"
    if not missing:
        return Finding(check, "ok", f"all {len(wanted)} flags that the pods need are on")
    fields = "; ".join(f"{flag} (for {field})" for flag, field in missing.items())
    remedy = set_command("config-features", knative.namespace, dict.fromkeys(missing, "enabled"))
    return Finding(check, "error", f"off, and needed: {fields}", remedy)


def check_volumes(stages: Sequence[StagePods]) -> Finding:
    """Whether pods can write to the volumes that they are to write to: Knative mounts all but claims read only."""
    paths = sorted(
        {
            volume.mount_path
            for stage in stages
            for volume in stage.pods.volumes or []
            if volume.host_path is not None and not volume.read_only
        }
    )
    if not paths:
        return Finding("volumes", "ok", "pods can write to the volumes that are not read only")
    message = f"{', '.join(paths)}: Knative mounts folders of the node read only"
    return Finding("volumes", "warning", message, "Use a claim to write to, or say readOnly: true.")


def check_autoscaler(knative: Knative, initial_scale: int) -> Finding:
    """Whether functions may begin with, and go down to, no pods."""
    check, name = "knative/config-autoscaler", "config-autoscaler"
    wrong = autoscaler_changes(knative.autoscaler, initial_scale)
    if "enable-scale-to-zero" in wrong:
        remedy = set_command(name, knative.namespace, {"enable-scale-to-zero": "true"})
        return Finding(
            check, "error", "enable-scale-to-zero is off, so that idle functions would keep their GPUs", remedy
        )
    if wrong:
        remedy = set_command(name, knative.namespace, wrong)
        remedy += "\nor install the chart with knative.initialScale: 1, which starts a pod of each function at once."
        return Finding(check, "error", "allow-zero-initial-scale is off, so that Knative refuses the functions", remedy)
    return Finding(check, "ok", "functions scale from and to zero")


def check_timeouts(knative: Knative, request_timeout: float) -> Finding:
    """Whether requests may take as long as the operator lets them."""
    check, key = "knative/config-defaults", "max-revision-timeout-seconds"
    longest = longest_request(knative.defaults)
    if longest >= request_timeout:
        return Finding(
            check, "ok", f"requests may take {longest:.0f} s; the operator lets them take {request_timeout:g} s"
        )
    needed = f"{math.ceil(request_timeout)}"
    remedy = set_command("config-defaults", knative.namespace, {key: needed})
    remedy += (
        f"\nkubectl patch deployment/activator --namespace {knative.namespace} --type merge --patch "
        f'\'{{"spec":{{"template":{{"spec":{{"terminationGracePeriodSeconds":{needed}}}}}}}}}\''
        "\nor install the chart with a shorter knative.requestTimeout."
    )
    return Finding(check, "error", f"{key} is {longest:.0f}, and the operator lets requests take {needed} s", remedy)


def check_release(settings: ClusterSettings) -> Finding:
    """How long a pod that was let go holds its GPU."""
    check, seconds = "release", f"{settings.draining_seconds:g} s"
    if settings.admission_port is not None and settings.admission_grace_seconds is not None:
        return Finding(check, "ok", f"pods that are let go hold their GPU for at most {seconds} (quickRelease)")
    if settings.operator_namespace is None:
        remedy = "kubectl exec --namespace NAMESPACE deployment/rlhfless -- python -m rlhfless_operator preflight"
        return Finding(check, "unknown", "the operator's own pods know whether it serves its webhook", remedy)
    remedy = "Install the chart with quickRelease.enabled: true."
    return Finding(check, "warning", f"pods that are let go hold their GPU for {seconds}: quickRelease is off", remedy)


def check_deployment(knative: Knative) -> Finding:
    """Whether pods that wait for a node keep their Revision alive, and pods may share nodes."""
    check, name = "knative/config-deployment", "config-deployment"
    wrong = deployment_changes(knative.deployment)
    if not wrong:
        return Finding(check, "ok", "pods may wait for nodes, and share them")
    reasons = {
        "pod-is-always-schedulable": "while pods wait for a GPU node, Knative gives up starting more",
        "default-affinity-type": "pods spread over nodes, so that fewer nodes can be let go",
    }
    message = "; ".join(f"{key} is not {value}: {reasons[key]}" for key, value in wrong.items())
    return Finding(check, "warning", message, set_command(name, knative.namespace, wrong))


def check_capacity(allocatable: Sequence[Mapping[str, str]], stages: Sequence[StagePods]) -> Finding:
    """Whether the nodes have the GPUs, and other extended resources, that pods ask for.

    Args:
        allocatable: of every node that takes pods.
    """
    check = "capacity"
    problems = []
    for stage in stages:
        for resource, amount in _extended(stage):
            largest = max((quantity(node.get(resource, "0")) for node in allocatable), default=0.0)
            total = sum(quantity(node.get(resource, "0")) for node in allocatable)
            if largest < amount:
                problems.append(
                    f"{stage.stage} asks for {amount:g} {resource} a pod, and no node has more than {largest:g}"
                )
            elif total < amount * stage.most:
                problems.append(
                    f"{stage.stage} may want {amount * stage.most:g} {resource} at a time, and all nodes have {total:g}"
                )
    if problems:
        remedy = (
            "Add nodes (or let a cluster autoscaler do so), install the GPU operator where nodes hide their GPUs, "
            "or lower generation.instances.max."
        )
        return Finding(check, "warning", "; ".join(problems), remedy)
    return Finding(check, "ok", f"{len(allocatable)} nodes have what a job asks for")


def check_quota(quotas: Sequence[Mapping[str, Any]], stages: Sequence[StagePods], namespace: str) -> Finding:
    """Whether the namespace's quotas let the pods start.

    Args:
        quotas: ResourceQuota objects.
    """
    errors, warnings = [], []
    for quota in quotas:
        name, hard = quota["metadata"]["name"], quota.get("spec", {}).get("hard", {})
        used = quota.get("status", {}).get("used", {})
        for stage in stages:
            for resource, amount in _extended(stage):
                key, most = f"requests.{resource}", amount * stage.most
                if key not in hard:
                    continue
                limit = quantity(hard[key])
                left = limit - quantity(used.get(key, "0"))
                if limit < amount:
                    errors.append(f"quota {name} allows {limit:g} {resource}, and {stage.stage} needs {amount:g} a pod")
                elif left < most:
                    warnings.append(f"quota {name} has {left:g} {resource} left, and {stage.stage} may want {most:g}")
            errors += [
                f"quota {name} limits {resource}, so that pods of {stage.stage} must say theirs"
                for resource in _unsaid(hard, stage.pods)
            ]
    check = f"quota of {namespace}"
    if errors:
        remedy = f"Raise the quota (kubectl edit resourcequota --namespace {namespace}), or give spec.pods.resources."
        return Finding(check, "error", "; ".join(errors), remedy)
    if warnings:
        remedy = "Jobs wait for what is in use: raise the quota, or lower generation.instances.max."
        return Finding(check, "warning", "; ".join(warnings), remedy)
    return Finding(check, "ok", f"{len(quotas)} quotas leave room" if quotas else "there is none")


def check_definition(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> Finding:
    """Whether the API server's CustomResourceDefinition is the operator's.

    Args:
        found: as it was fetched; None if there is none.
        wanted: as `rlhfless crd` prints it.
    """
    check, remedy = "definition", "rlhfless crd | kubectl apply --server-side --force-conflicts --filename -"
    if found is None:
        return Finding(check, "error", f"{NAME} is not installed", remedy)
    schemas = {version["name"]: version for version in found["spec"]["versions"]}
    if VERSION not in schemas:
        return Finding(check, "error", f"{NAME} has no version {VERSION}", remedy)
    (theirs,) = wanted["spec"]["versions"]
    missing = set(_fields(theirs["schema"]["openAPIV3Schema"])) - set(
        _fields(schemas[VERSION]["schema"]["openAPIV3Schema"])
    )
    if missing:
        some = ", ".join(sorted(missing)[:5])
        message = f"{NAME} is older than the operator: it lacks {some}" + (" and more" if len(missing) > 5 else "")
        return Finding(check, "error", message, remedy)
    return Finding(check, "ok", f"{NAME} {VERSION} has every field of this release")


def _extended(stage: StagePods) -> Iterator[tuple[str, float]]:
    """Extended resources of a pod, such as `nvidia.com/gpu`. What pods use in turns they don't ask for."""
    resources = stage.pods.resources
    limits = (resources.limits if resources else None) or {}
    for resource, amount in limits.items():
        if "/" in resource and (stage.slots is None or resource != stage.slots.resource):
            yield resource, quantity(amount)


def _unsaid(hard: Mapping[str, str], pods: PodsSpec) -> list[str]:
    """What a quota limits and the pods don't say: such pods are refused."""
    resources = pods.resources
    said = {"requests": (resources and resources.requests) or {}, "limits": (resources and resources.limits) or {}}
    unsaid = []
    for key in hard:
        if (found := _COMPUTE.fullmatch(key)) is None:
            continue
        side, resource = found[1] or "requests", found[2]
        given = resource in said[side] or (side == "requests" and resource in said["limits"])
        if not given:
            unsaid.append(f"{side}.{resource}")
    return unsaid


def _fields(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from _fields(inner, f"{path}{name}.")
    if "items" in schema:
        yield from _fields(schema["items"], f"{path.removesuffix('.')}[].")
