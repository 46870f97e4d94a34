"""Settings of the pods of a stage's function. Only a cluster reads this part of a job."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from rlhfless_functions.settings import Bytes, Settings

_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
_OWN_VARIABLES = ("RLHFLESS_STAGE", "RLHFLESS_TOKEN", "RLHFLESS_PRELOAD", "PORT", "HOSTNAME")
_OWN_FOLDERS = ("/tmp", "/dev/shm")
Item = TypeVar("Item")


def _quantity(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
        raise ValueError(f'{value!r} is not a quantity: write a whole number, or text such as "500m" or "16Gi"')
    return value


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(f"{path!r} is not absolute; begin it with /")
    return path


def _relative(path: str) -> str:
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise ValueError(f"{path!r} is not a path within the volume; write one without .. and without / at its start")
    return path


Quantity = Annotated[
    str,
    BeforeValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": f"^{_QUANTITY.pattern}$",
        }
    ),
]
"""An amount of a Kubernetes resource: a whole number, or text such as `"500m"` or `"16Gi"`."""

AbsolutePath = Annotated[str, AfterValidator(_absolute), WithJsonSchema({"type": "string", "pattern": "^/"})]
"""A path that begins with `/`."""

RelativePath = Annotated[str, AfterValidator(_relative), WithJsonSchema({"type": "string", "minLength": 1})]
"""A path within a folder, without `..`."""

KubernetesObject = dict[str, Any]
"""A part of a Kubernetes object, written as Kubernetes defines it."""


class ResourcesSpec(Settings):
    """Compute resources of a pod, as Kubernetes names them."""

    requests: dict[str, Quantity] | None = None
    """The amounts that a node must have free: `cpu`, `memory` and so on."""
    limits: dict[str, Quantity] | None = None
    """The most that a pod gets. Request GPUs here, as `nvidia.com/gpu`."""


class TolerationSpec(Settings):
    """A node taint that pods tolerate."""

    key: str | None = None
    """Key of the taint; every taint if omitted, with `operator: Exists`."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """Whether the taint's value matters."""
    value: str | None = None
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; every effect if omitted."""
    toleration_seconds: int | None = Field(default=None, ge=0)
    """How long a pod stays on a node after a `NoExecute` taint is added; forever if omitted."""


class VolumeSpec(Settings):
    """A volume in every pod, with exactly one of `claim`, `hostPath`, `secret` and `configMap`."""

    name: str | None = Field(default=None, max_length=63)
    """Name of the volume in the pod; by default made from its position in the list."""
    claim: str | None = None
    """Name of a PersistentVolumeClaim that several nodes can mount."""
    host_path: AbsolutePath | None = None
    """Folder on the node."""
    secret: str | None = None
    """Name of a Secret, whose keys become files."""
    config_map: str | None = None
    """Name of a ConfigMap, whose keys become files."""
    mount_path: AbsolutePath
    """Path at which the pod mounts it."""
    sub_path: RelativePath | None = None
    """Folder of the volume to mount; the whole volume if omitted."""
    read_only: bool = False
    """Whether the volume is mounted read-only."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        given = [source for source in (self.claim, self.host_path, self.secret, self.config_map) if source is not None]
        if len(given) != 1:
            raise ValueError("a volume needs exactly one source; write one of claim, hostPath, secret and configMap")
        if self.mount_path.rstrip("/") in _OWN_FOLDERS:
            raise ValueError(f"mountPath: rlhfless itself mounts {self.mount_path}; choose another path")
        return self


class PodsSpec(Settings):
    """The pods of a function. A stage's settings override the job's, and these override the cluster's defaults.
    Mappings are merged by key, lists are joined, and single values are replaced."""

    image: str | None = Field(default=None, min_length=1)
    """Container image of the function; by default the one that the operator was installed with."""
    image_pull_secrets: list[str] | None = Field(default=None, max_length=32)
    """Names of Secrets with credentials for image registries."""
    resources: ResourcesSpec | None = None
    """Compute resources of a pod."""
    node_selector: dict[str, str] | None = None
    """Labels that a node must have."""
    tolerations: list[TolerationSpec] | None = Field(default=None, max_length=32)
    """Node taints that the pods tolerate."""
    affinity: KubernetesObject | None = None
    """Rules for choosing nodes, written as a Kubernetes pod's `affinity`."""
    priority_class: str | None = None
    """Name of a PriorityClass."""
    runtime_class: str | None = None
    """Name of a RuntimeClass."""
    shared_memory: Bytes | None = None
    """Most memory in `/dev/shm`; up to the pod's memory limit if omitted."""
    volumes: list[VolumeSpec] | None = Field(default=None, max_length=32)
    """Volumes. If two have the same `mountPath`, the stage's overrides the job's, and the job's the cluster's."""
    env: dict[str, str] | None = None
    """Environment variables by name."""
    env_from: list[str] | None = Field(default=None, max_length=32)
    """Names of Secrets whose keys become environment variables."""
    template: KubernetesObject | None = None
    """Merged into the pod template (`metadata` and `spec`) of the Knative Service, for settings that have no field
    here. Mappings are merged, lists of named items are merged by name, other lists are replaced, and `null` removes."""

    @model_validator(mode="after")
    def _leaves_own_variables_alone(self) -> Self:
        for name in self.env or {}:
            if name in _OWN_VARIABLES:
                raise ValueError(f"env: rlhfless itself sets {name}; remove it")
        return self

    @model_validator(mode="after")
    def _asks_for_gpus_where_they_are_counted(self) -> Self:
        if (name := _gpu_in(self.template or {})) is not None:
            raise ValueError(f"template: prices, pools and plans count no GPUs there; write {name} in resources.limits")
        return self


def merge_pods(*layers: PodsSpec) -> PodsSpec:
    """Merge several settings of pods into one. Later layers override earlier ones.

    Mappings are merged by key, lists are joined (volumes by mount path), single values are replaced.
    """
    merged = PodsSpec()
    for layer in layers:
        merged = _laid_over(merged, layer)
    return merged


def overlay(base: KubernetesObject, over: KubernetesObject) -> KubernetesObject:
    """Merge `over` into a copy of `base`. Mappings are merged, lists of named mappings are merged by name, everything
    else is replaced, and None removes. Neither argument is changed."""
    merged = dict(base)
    for key, value in over.items():
        before = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            merged[key] = overlay(before if isinstance(before, dict) else {}, value)
        elif isinstance(before, list) and _named(value) and _named(before):
            merged[key] = _overlay_by_name(before, value)
        else:
            merged[key] = value
    return merged


def _gpu_in(value: object) -> str | None:
    """Return the name of a GPU resource that is asked for anywhere in a template; None if there is none."""
    if isinstance(value, list):
        return next(filter(None, map(_gpu_in, value)), None)
    if not isinstance(value, dict):
        return None
    asked = [each for each in (value.get("limits"), value.get("requests")) if isinstance(each, dict)]
    own = (name for each in asked for name in each if name.endswith("/gpu"))
    return next(own, None) or next(filter(None, map(_gpu_in, value.values())), None)


def _laid_over(base: PodsSpec, over: PodsSpec) -> PodsSpec:
    resources = None
    if base.resources or over.resources:
        below, above = base.resources or ResourcesSpec(), over.resources or ResourcesSpec()
        resources = ResourcesSpec(
            requests=_merged(below.requests, above.requests), limits=_merged(below.limits, above.limits)
        )
    return PodsSpec(
        image=over.image or base.image,
        image_pull_secrets=_joined(base.image_pull_secrets, over.image_pull_secrets),
        resources=resources,
        node_selector=_merged(base.node_selector, over.node_selector),
        tolerations=_joined(base.tolerations, over.tolerations),
        affinity=base.affinity if over.affinity is None else over.affinity,
        priority_class=over.priority_class or base.priority_class,
        runtime_class=over.runtime_class or base.runtime_class,
        shared_memory=base.shared_memory if over.shared_memory is None else over.shared_memory,
        volumes=_joined_volumes(base.volumes, over.volumes),
        env=_merged(base.env, over.env),
        env_from=_joined(base.env_from, over.env_from),
        template=over.template if base.template is None else overlay(base.template, over.template or {}),
    )


def _merged(base: dict[str, str] | None, over: dict[str, str] | None) -> dict[str, str] | None:
    return base if over is None else {**(base or {}), **over}


def _joined(base: list[Item] | None, over: list[Item] | None) -> list[Item] | None:
    return base if over is None else [*(item for item in base or [] if item not in over), *over]


def _joined_volumes(base: list[VolumeSpec] | None, over: list[VolumeSpec] | None) -> list[VolumeSpec] | None:
    if base is None or over is None:
        return base if over is None else over
    replaced = {volume.mount_path.rstrip("/") for volume in over}
    return [*(volume for volume in base if volume.mount_path.rstrip("/") not in replaced), *over]


def _named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "name" in item for item in value)


def _overlay_by_name(base: Iterable[KubernetesObject], over: Iterable[KubernetesObject]) -> list[KubernetesObject]:
    items = {item["name"]: item for item in base}
    for item in over:
        items[item["name"]] = overlay(items.get(item["name"], {}), item)
    return list(items.values())
