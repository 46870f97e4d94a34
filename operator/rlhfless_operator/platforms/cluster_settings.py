"""What the operator is told of its cluster when it is installed."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from rlhfless_functions.settings import Duration, Settings
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.pods import KubernetesObject, PodsSpec

PREFIX = "RLHFLESS_"
_JSON = ("pods", "pools", "egress_rules")
"""Settings that are written as JSON."""
_LISTS = ("namespaces", "topology_keys")
"""Settings that are separated by commas."""
_NUMBERS = ("metrics_port", "liveness_port", "admission_port", "admission_grace_seconds", "initial_scale")
"""Settings that are whole numbers."""

_SIDECAR_SECONDS = 31.0
"""From a pod's deletion until it is gone, as Knative has it: its sidecar waits for routes to change."""

Port = Annotated[int, Field(ge=0, le=65535)]


class ClusterSettingsError(UserError):
    """A variable of the operator's environment is missing or wrong."""


class PoolSettings(Settings):
    """GPUs that jobs share."""

    gpus: int = Field(ge=0)
    """GPUs of the pool."""
    resource: str = Field(default="nvidia.com/gpu", min_length=1)
    """The resource that a pod asks for them by, in its limits."""
    namespaces: dict[str, Annotated[int, Field(ge=0)]] = Field(default={})
    """Most GPUs of the pool that the jobs of a namespace hold at a time; all of them where it is not named."""
    accelerator: str | None = Field(default=None, min_length=1)
    """What these GPUs are, such as `H100`, or as the nodes' label `nvidia.com/gpu.product` says it: `rlhfless plan`
    forecasts for it."""
    device_class: str | None = Field(default=None, min_length=1)
    """DeviceClass of the pool's GPUs, where the cluster has Dynamic Resource Allocation (Kubernetes 1.34): pods then
    use them in turns, and stay, asleep, between their tasks. Each pod has GPUs of its own if left out."""
    gpus_per_group: int = Field(default=1, ge=1)
    """With a DeviceClass, GPUs that are allocated together, on one node: as many as the largest instance needs."""

    @model_validator(mode="after")
    def _check_slots(self) -> Self:
        if self.device_class is None:
            if self.gpus_per_group > 1:
                raise ValueError("gpusPerGroup is for a pool with a deviceClass; name one, or leave it out")
            return self
        for name, count in (("gpus", self.gpus), *((f"namespaces.{name}", n) for name, n in self.namespaces.items())):
            if count % self.gpus_per_group:
                raise ValueError(f"{name} is {count}; give a multiple of gpusPerGroup, which is {self.gpus_per_group}")
        if self.namespaces and sum(self.namespaces.values()) > self.gpus:
            raise ValueError(
                f"the namespaces have {sum(self.namespaces.values())} GPUs together, and the pool has {self.gpus}:"
                " what pods use in turns is held by their namespace; divide the pool among them"
            )
        return self

    def share_of(self, namespace: str) -> int:
        """GPUs that a namespace may have at a time."""
        if self.device_class is not None and self.namespaces:
            return self.namespaces.get(namespace, 0)
        return self.namespaces.get(namespace, self.gpus)


class ClusterSettings(Settings):
    """The settings of `rlhfless operator`: environment variables, each named in capitals after `RLHFLESS_`."""

    functions_image: str = Field(min_length=1)
    """Container image of the functions, where a job names none."""
    files: str = Field(default="/files", min_length=1)
    """Folder in the pods that the relative paths of a job are taken from."""
    artifacts: str = Field(default="/artifacts", min_length=1)
    """Folder in the pods, or fsspec URI, that a relative `spec.artifacts.uri` is taken from."""
    pods: PodsSpec = PodsSpec()
    """What every function pod is given, unless a job says otherwise; as JSON."""
    pools: dict[str, PoolSettings] = Field(default={})
    """GPUs that jobs share, by the name that `spec.pool` calls them by; as JSON. Jobs that name a pool which is not
    here wait; where there are none at all, jobs take what Kubernetes gives them."""
    namespaces: tuple[str, ...] = ()
    """Namespaces whose jobs are run, separated by commas; all of them if empty."""
    topology_keys: tuple[str, ...] = ()
    """Labels of nodes that say where they are, the nearest domain first, separated by commas: the webhook has the
    scheduler place a job's pods near each other by them. Pods go where Kubernetes puts them if empty."""
    metrics_port: Port = 9090
    """Port of Prometheus' metrics; 0 for any that is free."""
    liveness_port: Port = 8081
    """Port of the liveness probe; 0 for any that is free."""
    admission_port: Port | None = None
    """Port of the webhooks by which function pods are made to go quickly, are placed near each other, and get their
    slots; they are not served if left out."""
    admission_certificate: str = Field(default="/etc/rlhfless/admission", min_length=1)
    """Folder with the webhook's certificate and key, `tls.crt` and `tls.key`, as Secrets of type kubernetes.io/tls have
    them. They are read anew when they change."""
    admission_grace_seconds: int | None = Field(default=None, ge=1)
    """Seconds that a function pod has to end when it is deleted, where the webhooks are served; it goes as Knative has
    it if left out."""
    request_timeout: Duration = 600.0
    """Longest request, which is one actor's share or one learning step: Knative ends what takes longer. At most
    `max-revision-timeout-seconds` of Knative's `config-defaults`."""
    start_timeout: Duration = 900.0
    """Longest time from a request to its first line, with the start of a pod: its image may have to be pulled, and its
    model has to be loaded."""
    initial_scale: Literal[0, 1] = 0
    """Pods that a new Revision starts with. 0 needs `allow-zero-initial-scale` in Knative's `config-autoscaler`."""
    knative_namespace: str = Field(default="knative-serving", min_length=1)
    """Namespace of Knative Serving, whose pods alone may reach function pods."""
    operator_namespace: str | None = None
    """Namespace of the operator's own pods, labelled `app.kubernetes.io/name: rlhfless`: they may reach function pods
    too, to ask whether they are busy. Without it a cut is not waited for."""
    egress: Literal["open", "restricted"] = "open"
    """Where function pods may connect to: anywhere, or only to what their job needs: names, its stores, the model hub,
    its reward servers."""
    egress_rules: list[KubernetesObject] = Field(default=[])
    """What restricted pods may connect to besides, as rules of a NetworkPolicy's `egress`; as JSON."""
    ingress: str | None = None
    """Base address for requests to functions, with the Service's name as `Host`; each Service's own address
    if left out, which needs the cluster's names to resolve where the operator runs."""

    @property
    def draining_seconds(self) -> float:
        """How long a pod that was let go holds its GPU: until its grace period is over where the webhook is served,
        which Knative's sidecar waits out, and else as long as that holds the container's preStop hook."""
        if self.admission_port is None or self.admission_grace_seconds is None:
            return _SIDECAR_SECONDS
        return min(_SIDECAR_SECONDS, self.admission_grace_seconds)

    @property
    def has_slots(self) -> bool:
        """Whether there is a pool whose GPUs are used in turns."""
        return any(pool.device_class is not None for pool in self.pools.values())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read the settings.

        Raises:
            ClusterSettingsError: naming the variable, what is wrong and the remedy.
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

    def to_environment(self) -> dict[str, str]:
        """The variables that these settings are read from; what is at its default is left out."""
        changed = self.model_dump(mode="json", by_alias=False, exclude_defaults=True)
        as_json = self.model_dump(mode="json", by_alias=True, exclude_none=True, include=set(_JSON))
        written: dict[str, str] = {}
        for name, value in changed.items():
            if name in _JSON:
                text = json.dumps(as_json[str(type(self).model_fields[name].alias)])
            else:
                text = ",".join(value) if isinstance(value, list) else str(value)
            written[variable_of(name)] = text
        return written


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
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
            raise ClusterSettingsError(f"{variable_of(name)}: {text!r} is no whole number; write one") from error
    return text
