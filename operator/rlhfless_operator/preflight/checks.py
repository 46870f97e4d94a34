"""The checks: pure functions of a cluster's objects."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhfless_operator.job.generated.crd import NAME, VERSION
from rlhfless_operator.job.pods import PodsSpec
from rlhfless_operator.job.quantities import quantity
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import SlotsWanted
from rlhfless_operator.platforms.room import why_not_in_pool
from rlhfless_operator.preflight.features import missing_features, wanted_features
from rlhfless_operator.preflight.findings import Finding, set_command
from rlhfless_operator.preflight.knative_settings import autoscaler_changes, deployment_changes, longest_request

OLDEST_KNATIVE = (1, 21)
"""The first release in which a Revision's scale annotations can be changed."""
_MODULE_OFFSET = 27
"""Labels with the version of Knative's modules say 0.48 for Knative 1.21."""
_COMPUTE = re.compile(r"(?:(requests|limits)\.)?(cpu|memory)")


@dataclass(frozen=True)
class Knative:
    """The set-up of Knative Serving: the data of its ConfigMaps, and the version from its labels."""

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
    """Most of them at a time."""
    slots: SlotsWanted | None = None
    """Slots that they use in turns, besides the resources in `pods`; None if they have GPUs of their own, or none."""


def check_options(job: RLHFJob | None, settings: ClusterSettings, namespace: str) -> list[Finding]:
    """Find options of a job that its pool does not support."""
    refusal = why_not_in_pool(job, settings, namespace) if job is not None else None
    if job is None or refusal is None:
        return []
    field = "spec.preparation.instances" if job.spec.asynchronous is None else "spec.async"
    return [Finding(field, "error", refusal)]


def check_version(version: str) -> Finding:
    """Check that Knative is new enough.

    Args:
        version: such as `1.21.0`, or `0.48.2` as the version of its modules; empty if unknown.
    """
    check, wanted = "knative/version", ".".join(str(part) for part in OLDEST_KNATIVE)
    found = re.match(r"v?(\d+)\.(\d+)", version)
    if found is None:
        return Finding(check, "unknown", f"Knative's labels don't give its version; jobs need {wanted} or newer")
    release = (int(found[1]), int(found[2]))
    if release[0] == 0:
        release = (1, release[1] - _MODULE_OFFSET)
    if release < OLDEST_KNATIVE:
        remedy = f"Upgrade Knative Serving to {wanted} or newer: older releases undo changes of a Revision's scale."
        return Finding(check, "error", f"Knative is {version}", remedy)
    return Finding(check, "ok", f"Knative is {version}")


def check_features(knative: Knative, pod_specs: Sequence[Mapping[str, Any]]) -> Finding:
    """Check that Knative allows the pods' fields.

    Args:
        pod_specs: pod specs of the Knative Services.
    """
    wanted = wanted_features(pod_specs)
    missing = missing_features(wanted, knative.features)
    check = "knative/config-features"
    if not missing:
        return Finding(check, "ok", f"all {len(wanted)} feature flags that the pods need are on")
    fields = "; ".join(f"{flag} (for {field})" for flag, field in missing.items())
    remedy = set_command("config-features", knative.namespace, dict.fromkeys(missing, "enabled"))
    return Finding(check, "error", f"needed feature flags are off: {fields}", remedy)


def check_volumes(stages: Sequence[StagePods]) -> Finding:
    """Check that pods can write to their writable volumes. Knative mounts all volumes but claims read-only."""
    paths = sorted(
        {
            volume.mount_path
            for stage in stages
            for volume in stage.pods.volumes or []
            if volume.host_path is not None and not volume.read_only
        }
    )
    if not paths:
        return Finding("volumes", "ok", "pods can write to all volumes that are not read-only")
    message = f"{', '.join(paths)}: Knative mounts folders of the node read-only"
    return Finding("volumes", "warning", message, "Use a claim for a writable volume, or set readOnly: true.")


def check_autoscaler(knative: Knative, initial_scale: int) -> Finding:
    """Check that functions may start with no pods and scale to zero."""
    check, name = "knative/config-autoscaler", "config-autoscaler"
    wrong = autoscaler_changes(knative.autoscaler, initial_scale)
    if "enable-scale-to-zero" in wrong:
        remedy = set_command(name, knative.namespace, {"enable-scale-to-zero": "true"})
        return Finding(check, "error", "enable-scale-to-zero is off: idle functions would keep their GPUs", remedy)
    if wrong:
        remedy = set_command(name, knative.namespace, wrong)
        remedy += (
            "\nor install the chart with knative.initialScale: 1, which starts a pod of each function immediately."
        )
        return Finding(check, "error", "allow-zero-initial-scale is off: Knative refuses the functions", remedy)
    return Finding(check, "ok", "functions can start from zero and scale to zero")


def check_timeouts(knative: Knative, request_timeout: float) -> Finding:
    """Check that Knative lets requests take as long as the operator does."""
    check, key = "knative/config-defaults", "max-revision-timeout-seconds"
    longest = longest_request(knative.defaults)
    if longest >= request_timeout:
        return Finding(
            check, "ok", f"Knative lets requests take {longest:.0f} s; the operator's limit is {request_timeout:g} s"
        )
    needed = f"{math.ceil(request_timeout)}"
    remedy = set_command("config-defaults", knative.namespace, {key: needed})
    remedy += (
        f"\nkubectl patch deployment/activator --namespace {knative.namespace} --type merge --patch "
        f'\'{{"spec":{{"template":{{"spec":{{"terminationGracePeriodSeconds":{needed}}}}}}}}}\''
        "\nor install the chart with a shorter knative.requestTimeout."
    )
    return Finding(check, "error", f"{key} is {longest:.0f}, but the operator lets requests take {needed} s", remedy)


def check_release(settings: ClusterSettings) -> Finding:
    """Check how long a released pod holds its GPU."""
    check, seconds = "release", f"{settings.draining_seconds:g} s"
    if settings.admission_port is not None and settings.admission_grace_seconds is not None:
        return Finding(check, "ok", f"released pods hold their GPU for at most {seconds} (quickRelease)")
    if settings.operator_namespace is None:
        remedy = "kubectl exec --namespace NAMESPACE deployment/rlhfless -- python -m rlhfless_operator preflight"
        return Finding(check, "unknown", "only the operator's pods can tell whether it serves its webhook", remedy)
    remedy = "Install the chart with quickRelease.enabled: true."
    return Finding(check, "warning", f"released pods hold their GPU for {seconds}: quickRelease is off", remedy)


def check_deployment(knative: Knative) -> Finding:
    """Check that a Revision survives while its pods wait for a node, and that pods may share nodes."""
    check, name = "knative/config-deployment", "config-deployment"
    wrong = deployment_changes(knative.deployment)
    if not wrong:
        return Finding(check, "ok", "pods may wait for nodes and share them")
    reasons = {
        "pod-is-always-schedulable": "while pods wait for a GPU node, Knative stops starting more",
        "default-affinity-type": "pods spread over nodes, and fewer nodes become empty",
    }
    message = "; ".join(f"{key} is not {value}: {reasons[key]}" for key, value in wrong.items())
    return Finding(check, "warning", message, set_command(name, knative.namespace, wrong))


def check_capacity(allocatable: Sequence[Mapping[str, str]], stages: Sequence[StagePods]) -> Finding:
    """Check that the nodes have the GPUs and other extended resources that pods request.

    Args:
        allocatable: allocatable resources of every schedulable node.
    """
    check = "capacity"
    problems = []
    for stage in stages:
        for resource, amount in _extended(stage):
            largest = max((quantity(node.get(resource, "0")) for node in allocatable), default=0.0)
            total = sum(quantity(node.get(resource, "0")) for node in allocatable)
            if largest < amount:
                problems.append(
                    f"{stage.stage} requests {amount:g} {resource} per pod, but no node has more than {largest:g}"
                )
            elif total < amount * stage.most:
                problems.append(
                    f"{stage.stage} may use {amount * stage.most:g} {resource} at a time, but all nodes have {total:g}"
                )
    if problems:
        remedy = (
            "Add nodes (or let a cluster autoscaler do so), install the GPU operator if nodes don't offer their GPUs, "
            "or lower generation.instances.max."
        )
        return Finding(check, "warning", "; ".join(problems), remedy)
    return Finding(check, "ok", f"{len(allocatable)} nodes have the resources that a job requests")


def check_quota(quotas: Sequence[Mapping[str, Any]], stages: Sequence[StagePods], namespace: str) -> Finding:
    """Check that the namespace's quotas let the pods start.

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
                    errors.append(
                        f"quota {name} allows {limit:g} {resource}, but {stage.stage} needs {amount:g} per pod"
                    )
                elif left < most:
                    warnings.append(f"quota {name} has {left:g} {resource} left, but {stage.stage} may use {most:g}")
            errors += [
                f"quota {name} limits {resource}, so pods of {stage.stage} must set it"
                for resource in _unsaid(hard, stage.pods)
            ]
    check = f"quota of {namespace}"
    if errors:
        remedy = f"Raise the quota (kubectl edit resourcequota --namespace {namespace}), or set spec.pods.resources."
        return Finding(check, "error", "; ".join(errors), remedy)
    if warnings:
        remedy = "Jobs wait until enough is free: raise the quota, or lower generation.instances.max."
        return Finding(check, "warning", "; ".join(warnings), remedy)
    return Finding(check, "ok", f"{len(quotas)} quotas leave room" if quotas else "there are no quotas")


def check_definition(found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> Finding:
    """Check that the API server's CustomResourceDefinition matches the operator's.

    Args:
        found: the CRD on the API server; None if there is none.
        wanted: the CRD that `rlhfless crd` prints.
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
    """Return the extended resources that a pod requests, such as `nvidia.com/gpu`. Pods don't request GPUs that they
    use in turns."""
    resources = stage.pods.resources
    limits = (resources.limits if resources else None) or {}
    for resource, amount in limits.items():
        if "/" in resource and (stage.slots is None or resource != stage.slots.resource):
            yield resource, quantity(amount)


def _unsaid(hard: Mapping[str, str], pods: PodsSpec) -> list[str]:
    """Return the resources that a quota limits and the pods don't set. The quota refuses such pods."""
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
