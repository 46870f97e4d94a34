"""The operator's settings for its cluster, which the installation provides."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rlhfless_functions.settings import Duration, Settings
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.pods import KubernetesObject, PodsSpec, VolumeSpec

PREFIX = "RLHFLESS_"
_JSON = ("pods", "pools", "egress_rules")
"""Settings in JSON."""
_LISTS = ("namespaces", "topology_keys", "further_artifacts")
"""Settings with commas between their items."""
_NUMBERS = ("metrics_port", "liveness_port", "admission_port", "admission_grace_seconds", "initial_scale")
"""Settings that are whole numbers."""

_SIDECAR_SECONDS = 31.0
"""Seconds from a pod's deletion until it is gone with Knative's defaults: its sidecar waits for routes to change."""

Port = Annotated[int, Field(ge=0, le=65535)]


class ClusterSettingsError(UserError):
    """A variable of the operator's environment is missing or wrong."""


class PoolSettings(Settings):
    """GPUs that jobs share."""

    gpus: int = Field(ge=0)
    """GPUs of the pool."""
    resource: str = Field(default="nvidia.com/gpu", min_length=1)
    """The resource name by which pods request them in their limits."""
    namespaces: dict[str, Annotated[int, Field(ge=0)]] = Field(default={})
    """Most GPUs of the pool that the jobs of each namespace hold at a time; all of them for a namespace without
    entry."""
    accelerator: str | None = Field(default=None, min_length=1)
    """Product name of these GPUs, such as `H100`, or the value of the nodes' label `nvidia.com/gpu.product`.
    `rlhfless plan` uses it for forecasts."""
    device_class: str | None = Field(default=None, min_length=1)
    """DeviceClass of the pool's GPUs, if the cluster has Dynamic Resource Allocation (Kubernetes 1.34). Pods then use
    the GPUs in turns, and sleep between their tasks. If omitted, each pod has GPUs of its own."""
    gpus_per_group: int = Field(default=1, ge=1)
    """With a DeviceClass: number of GPUs that are allocated together on one node, as many as the largest instance
    needs."""

    @model_validator(mode="after")
    def _check_slots(self) -> Self:
        if self.device_class is None:
            if self.gpus_per_group > 1:
                raise ValueError("gpusPerGroup needs a deviceClass; set deviceClass, or remove gpusPerGroup")
            return self
        for name, count in (("gpus", self.gpus), *((f"namespaces.{name}", n) for name, n in self.namespaces.items())):
            if count % self.gpus_per_group:
                raise ValueError(f"{name} is {count}; write a multiple of gpusPerGroup, which is {self.gpus_per_group}")
        if self.namespaces and sum(self.namespaces.values()) > self.gpus:
            raise ValueError(
                f"the namespaces have {sum(self.namespaces.values())} GPUs together, but the pool has {self.gpus};"
                " each namespace holds the GPUs that its pods use in turns, so divide the pool among them"
            )
        return self

    def share_of(self, namespace: str) -> int:
        """Return the GPUs that a namespace may hold at a time."""
        if self.device_class is not None and self.namespaces:
            return self.namespaces.get(namespace, 0)
        return self.namespaces.get(namespace, self.gpus)


class ClusterSettings(Settings):
    """The settings of `rlhfless operator`: environment variables, each named in capitals after `RLHFLESS_`."""

    functions_image: str = Field(min_length=1)
    """Container image of the functions, for jobs that name none."""
    files: str = Field(default="/files", min_length=1)
    """Folder in the pods that relative paths of a job are relative to."""
    artifacts: str = Field(default="/artifacts", min_length=1)
    """Folder in the pods, or fsspec URI, that a relative `spec.artifacts.uri` is relative to."""
    further_artifacts: tuple[str, ...] = ()
    """Further folders or fsspec URIs below which jobs may have their artifacts, separated by commas. A job's folder is
    `BASE/NAMESPACE/PATH/NAME` in each of them; every other URI is refused."""
    artifacts_claim: Literal["shared", "separate"] = "shared"
    """Content of the claim that pods mount at `artifacts`: the folders of all namespaces (`shared`), of which a pod
    mounts its namespace's, or in each namespace only its own folder (`separate`)."""
    pods: PodsSpec = PodsSpec()
    """Defaults of every function pod, which jobs may override; as JSON."""
    pools: dict[str, PoolSettings] = Field(default={})
    """GPU pools that jobs share, by the name in `spec.pool`; as JSON. A job that names an unknown pool waits. Without
    any pools, Kubernetes alone places the pods."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose jobs the operator runs, separated by commas; all of them if empty."""
    topology_keys: tuple[str, ...] = ()
    """Node labels with the node's location, the nearest domain first, separated by commas. The webhook uses them to
    place a job's pods near each other. If empty, Kubernetes alone places the pods."""
    metrics_port: Port = 9090
    """Port of Prometheus' metrics; 0 for any free port."""
    liveness_port: Port = 8081
    """Port of the liveness probe; 0 for any free port."""
    admission_port: Port | None = None
    """Port of the webhooks that make function pods terminate quickly, place them near each other, and give them their
    slots; if omitted, there are no webhooks."""
    admission_certificate: str = Field(default="/etc/rlhfless/admission", min_length=1)
    """Folder with the webhook's certificate and key, `tls.crt` and `tls.key`, as in Secrets of type kubernetes.io/tls.
    They are reloaded when they change."""
    admission_clients: str | None = Field(default=None, min_length=1)
    """File with the certificate authority of the API servers' client certificates. The webhooks then answer nobody
    else; if omitted, they answer everybody who reaches their port."""
    admission_grace_seconds: int | None = Field(default=None, ge=1)
    """Grace period of a deleted function pod in seconds, if the webhooks are served; if omitted, Knative's."""
    request_timeout: Duration = 600.0
    """Longest request, which is one actor's share or one learning step; Knative ends longer ones. At most
    `max-revision-timeout-seconds` of Knative's `config-defaults`."""
    start_timeout: Duration = 900.0
    """Longest time from a request to its first line. It includes the start of a pod, which may pull its image and must
    load its model."""
    initial_scale: Literal[0, 1] = 0
    """Pods that a new Revision starts with. 0 needs `allow-zero-initial-scale` in Knative's `config-autoscaler`."""
    knative_namespace: str = Field(default="knative-serving", min_length=1)
    """Namespace of Knative Serving. Function pods accept connections from its pods only."""
    operator_namespace: str | None = None
    """Namespace of the operator's own pods, labelled `app.kubernetes.io/name: rlhfless`. They may reach function pods
    too, to ask whether they are busy. Without it, the operator does not wait for cut tasks to publish."""
    egress: Literal["open", "restricted"] = "open"
    """Destinations of function pods: all (`open`), or only those that their job needs (`restricted`): DNS, its stores,
    the model hub, its reward servers."""
    egress_rules: list[KubernetesObject] = Field(default=[])
    """Further destinations of restricted pods, as rules of a NetworkPolicy's `egress`; as JSON."""
    ingress: str | None = None
    """Base address for requests to functions, with the Service's name as `Host`; by default each Service's own address,
    for which the operator must resolve the cluster's names."""

    @property
    def draining_seconds(self) -> float:
        """Seconds for which a released pod holds its GPU. With the webhook it is the pod's grace period, because
        Knative's sidecar waits until that ends; else the time for which the sidecar delays the preStop hook."""
        if self.admission_port is None or self.admission_grace_seconds is None:
            return _SIDECAR_SECONDS
        return min(_SIDECAR_SECONDS, self.admission_grace_seconds)

    def pods_in(self, namespace: str) -> PodsSpec:
        """Return the defaults of the pods of a namespace: of the store's volume they mount only its folder."""
        volumes = [self._of_namespace(volume, namespace) for volume in self.pods.volumes or []]
        return self.pods.model_copy(update={"volumes": volumes}) if volumes else self.pods

    @property
    def store_claim(self) -> str | None:
        """Name of the claim that the store's folder is on; None without one."""
        found = [volume.claim for volume in self.pods.volumes or [] if self._has_store(volume)]
        return found[0] if found else None

    def _of_namespace(self, volume: VolumeSpec, namespace: str) -> VolumeSpec:
        if not self._has_store(volume):
            return volume
        place = f"{volume.mount_path.rstrip('/')}/{namespace}"
        sub_path = namespace if self.artifacts_claim == "shared" else None
        return volume.model_copy(update={"mount_path": place, "sub_path": sub_path})

    def _has_store(self, volume: VolumeSpec) -> bool:
        return volume.claim is not None and volume.mount_path.rstrip("/") == self.artifacts.rstrip("/")

    @property
    def has_slots(self) -> bool:
        """Whether there is a pool whose GPUs pods use in turns."""
        return any(pool.device_class is not None for pool in self.pools.values())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the settings.

        Raises:
            ClusterSettingsError: a variable is missing or wrong; the message names it with the remedy.
        """
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            text = environment.get(variable_of(name), "")
            if text:
                values[name] = _read(name, field, text)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = []
            names = {str(field.alias): name for name, field in cls.model_fields.items()}
            for details in error.errors(include_url=False):
                first, *rest = (str(part) for part in details["loc"])
                place = variable_of(names.get(first, first)) + "".join(f".{part}" for part in rest)
                message = "missing; set it" if details["type"] == "missing" else details["msg"]
                lines.append(f"{place}: {message}")
            raise ClusterSettingsError("; ".join(lines)) from error


def variable_of(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


def _read(name: str, field: FieldInfo, text: str) -> Any:
    if name in _JSON:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ClusterSettingsError(f"{variable_of(name)}: not JSON ({error}); write JSON") from error
    if name in _LISTS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if name in _NUMBERS:
        try:
            return int(text)
        except ValueError as error:
            raise ClusterSettingsError(f"{variable_of(name)}: {text!r} is not a whole number; write one") from error
    return text
