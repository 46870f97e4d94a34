"""Checks of pools whose GPUs pods use in turns: pure functions of the cluster's objects."""

from collections.abc import Mapping, Sequence

from rlhfless_operator.platforms.cluster_settings import PoolSettings
from rlhfless_operator.preflight.checks import StagePods
from rlhfless_operator.preflight.devices import DynamicResources, offer_of
from rlhfless_operator.preflight.findings import Finding

_GUIDE = 'See docs/install.md, "GPUs that pods use in turns".'


def check_pool(name: str, pool: PoolSettings, found: DynamicResources) -> Finding:
    """Check that a cluster has the devices of a pool with a DeviceClass."""
    assert pool.device_class is not None, "a pool without a DeviceClass has no turns"
    check, value, device_class = f"pool {name}", f"pools.{name}", pool.device_class
    without = f"install the chart without {value}.deviceClass: each pod then has GPUs of its own."
    if not found.has_claims:
        message = f"{value}.deviceClass is {device_class}, but {_lack_of_claims(found)}"
        return Finding(check, "error", message, f"Upgrade to Kubernetes 1.34 or newer, or {without}")
    if found.classes is None or found.slices is None:
        remedy = "Use an account that may list deviceclasses and resourceslices."
        return Finding(check, "unknown", f"devices of {device_class} can't be counted: {found.refusal}", remedy)
    if device_class not in found.classes:
        there = ", ".join(sorted(found.classes))
        message = f"{value}.deviceClass is {device_class}, but there is no such DeviceClass; "
        if there:
            return Finding(check, "error", f"{message}the cluster has {there}", f"Name one of these, or {without}")
        remedy = f"Install the DRA driver of these GPUs, which brings its DeviceClass, or {without}"
        return Finding(check, "error", f"{message}the cluster has none", remedy)
    offer, together = offer_of(found.classes[device_class], found.slices), pool.gpus_per_group
    at_most = "" if offer.exact else "at most "
    if offer.total == 0:
        remedy = "Check that the driver's pods run on the GPU nodes, and see kubectl get resourceslices."
        return Finding(check, "error", f"no ResourceSlice offers a device of DeviceClass {device_class}", remedy)
    if offer.largest < together:
        message = f"{value}.gpusPerGroup is {together}, but no node has more than {offer.largest} of {device_class}"
        remedy = f"Install the chart with {value}.gpusPerGroup: {offer.largest} or less, or add nodes that have more."
        return Finding(check, "error", message, remedy)
    room = offer.in_groups_of(together)
    groups = f" in groups of {together}" if together > 1 else ""
    counted = f"{at_most}{room} devices of {device_class}{groups}"
    if room < pool.gpus:
        message = f"{value}.gpus is {pool.gpus}, but ResourceSlices offer {counted}: pods on the others would wait"
        return Finding(check, "warning", message, f"Install the chart with {value}.gpus: {room}, or add nodes.")
    if offer.exact:
        return Finding(check, "ok", f"ResourceSlices offer {counted}, and pods use {pool.gpus} in turns")
    message = f"pods use {pool.gpus} in turns; ResourceSlices offer {counted}: its selectors may pick fewer"
    return Finding(check, "ok", message)


def check_instances(name: str, pool: PoolSettings, stages: Sequence[StagePods]) -> Finding:
    """Check that a group of a pool has as many GPUs as an instance of a job needs."""
    check, together = f"instances in pool {name}", pool.gpus_per_group
    large = {stage.stage: stage.slots.gpus for stage in stages if stage.slots and stage.slots.gpus > together}
    if not large:
        return Finding(check, "ok", f"no instance needs more than {together} GPUs together (pools.{name}.gpusPerGroup)")
    asked = "; ".join(f"{stage} requests {gpus} {pool.resource} per pod" for stage, gpus in large.items())
    message = f"{asked}, but pools.{name}.gpusPerGroup is {together}"
    remedy = f"Lower resources.limits, or install the chart with pools.{name}.gpusPerGroup: "
    return Finding(check, "error", message, f"{remedy}{max(large.values())}.")


def say_turns(found: DynamicResources) -> Finding:
    """For a cluster without a pool with a DeviceClass, say what turns would bring, and what the cluster lacks for
    them."""
    check = "turns"
    message = "no known pool has a deviceClass. With one, pods use GPUs in turns and start once per job"
    if not found.has_claims:
        return Finding(check, "ok", f"{message}; but {_lack_of_claims(found)}, which needs Kubernetes 1.34")
    if found.classes is None or found.slices is None:
        return Finding(check, "ok", f"{message}; {found.server} supports the ResourceClaims that this needs", _GUIDE)
    offers = {name: offer_of(each, found.slices) for name, each in found.classes.items()}
    usable = sorted(name for name, offer in offers.items() if offer.total)
    if usable:
        return Finding(check, "ok", f"{message}; the cluster has devices of DeviceClass {', '.join(usable)}", _GUIDE)
    lacking = "its DeviceClasses have no devices in a ResourceSlice" if offers else "it has no DeviceClass"
    return Finding(check, "ok", f"{message}; but the cluster lacks a DRA driver for its GPUs: {lacking}", _GUIDE)


def pools_with_turns(pools: Mapping[str, PoolSettings]) -> dict[str, PoolSettings]:
    """Return the pools whose GPUs pods use in turns."""
    return {name: pool for name, pool in pools.items() if pool.device_class is not None}


def _lack_of_claims(found: DynamicResources) -> str:
    instead = f", only {', '.join(found.versions)}" if found.versions else ""
    return f"the API server ({found.server}) has no resource.k8s.io/v1{instead}"
