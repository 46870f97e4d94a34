"""The manifests of a job's functions on a cluster: pure functions of job, pods and the cluster's settings.

The pod template never changes while a job runs, because Knative would create a new Revision with new pods. What changes
from step to step is in the requests, and in the pointer file that `RLHFLESS_PRELOAD` names.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from rlhfless_functions.api import Stage
from rlhfless_functions.artifacts import join
from rlhfless_operator.job.charged import Function
from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec, VolumeSpec, overlay
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.egress import egress_rules

Manifest = dict[str, Any]

MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "rlhfless"
JOB_LABEL = "rlhfless.io/job"
STAGE_LABEL = "rlhfless.io/stage"
MIN_SCALE = "autoscaling.knative.dev/min-scale"
MAX_SCALE = "autoscaling.knative.dev/max-scale"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
TURNS_LABEL = "rlhfless.io/takes-turns"
"""Label of pods that must not be created without their slots."""
POOL = "rlhfless.io/pool"
"""Annotation: the pool of a pod's slots. Label of a pool's claims."""
GPUS = "rlhfless.io/gpus"
"""Annotation: the number of a pod's slots."""
SLOTS = "rlhfless.io/slots"
"""Annotation that the webhook adds: the names of a pod's slots, separated by commas."""
PORT = 8080
USER = 65532
TOKEN_KEY = "token"
CONTAINER = "function"

_LONGEST_NAME = 63
_REVISION_SUFFIX = "-00001"
_CPU_SUFFIX = "m"


@dataclass(frozen=True)
class JobIdentity:
    """The custom resource that owns the functions."""

    namespace: str
    name: str
    uid: str
    api_version: str
    kind: str


@dataclass(frozen=True)
class SlotsWanted:
    """GPUs that the pods of a stage use in turns with others."""

    pool: str
    """Name of the pool."""
    gpus: int
    """Slots of a pod."""
    resource: str
    """The resource by which pods request GPUs in their limits. A pod with slots does not request it."""


@dataclass(frozen=True)
class StageFunction:
    """One stage of one job."""

    job: JobIdentity
    stage: Stage
    pods: PodsSpec
    """Merged settings: the stage's over the job's over the cluster's."""
    root: str
    """URI of the job's folder."""
    env: Mapping[str, str] = field(default_factory=dict)
    """More of rlhfless' own variables, the same for the whole job."""
    connects_to: frozenset[str] = frozenset()
    """URLs that the job's pods need."""
    slots: SlotsWanted | None = None
    """The slots that its pods use in turns; None if they have GPUs of their own, or none."""
    instances: int = 1
    """Most pods that work on one task together, and talk to each other for it."""
    relays: bool = False
    """Whether its pods pass weights on to each other."""

    @property
    def name(self) -> str:
        """Name of the Knative Service."""
        return service_name(self.job.name, self.stage)

    @property
    def preload(self) -> str:
        """URI of the file that names the model which a new pod loads before it is ready."""
        return join(self.root, "preload", f"{self.stage}.json")


def service_name(job: str, function: Function) -> str:
    """Return the name of the Service of a function: `JOB-STAGE`, `JOB-environment` or `JOB-shelter`.

    If that is no valid name of a Kubernetes Service, because of its length or first character, the name is made of its
    beginning and its hash.
    """
    name = f"{job}-{function}"
    if job[:1].isalpha() and len(name) + len(_REVISION_SUFFIX) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(job.encode()).hexdigest()[:8]
    return f"j-{job[:24].rstrip('-')}-{digest}-{function}"


def secret_name(job: str) -> str:
    """Return the name of the Secret with the job's token."""
    return f"{job}-token"


def policy_name(job: str) -> str:
    """Return the name of the job's NetworkPolicy."""
    return f"{job}-functions"


def job_selector(job: str) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {MANAGED_BY: MANAGER, JOB_LABEL: job}


def token_secret(job: JobIdentity, token: str) -> Manifest:
    """Return the Secret with the token that every request to the job's functions carries."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata_of(job, secret_name(job.name)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: token},
    }


def network_policy(job: JobIdentity, settings: ClusterSettings, connects_to: Iterable[str] = ()) -> Manifest:
    """Return the policy that lets only Knative's pods, which forward requests, reach a job's functions. The pods of
    its environment have a policy of their own.

    If the operator's namespace is known, its pods may ask them whether they are busy. Restricted pods may reach only
    the destinations that they need.

    Args:
        connects_to: URLs that the job's pods need.
    """
    sources: list[Manifest] = [from_namespace(settings.knative_namespace)]
    if settings.operator_namespace is not None:
        operator = {"podSelector": {"matchLabels": {"app.kubernetes.io/name": MANAGER}}}
        sources.append(from_namespace(settings.operator_namespace) | operator)
    spec: Manifest = {
        "podSelector": {
            "matchLabels": job_selector(job.name),
            "matchExpressions": [{"key": STAGE_LABEL, "operator": "NotIn", "values": ["environment"]}],
        },
        "policyTypes": ["Ingress"],
        "ingress": [{"from": sources}],
    }
    if settings.egress == "restricted":
        spec["policyTypes"] = ["Ingress", "Egress"]
        spec["egress"] = egress_rules(connects_to, job.namespace, settings.egress_rules)
    return policy(job, policy_name(job.name), spec)


def gang_policy_name(job: str, stage: Stage) -> str:
    """Return the name of the NetworkPolicy of a stage's pods that reach each other."""
    return f"{job}-gang" if stage == "learning" else f"{job}-relays"


def gang_policy(function: StageFunction, settings: ClusterSettings) -> Manifest:
    """Return the policy by which only pods of a stage that work together, or pass weights on, reach each other.

    They choose their ports.
    """
    together = {"podSelector": {"matchLabels": job_selector(function.job.name) | {STAGE_LABEL: function.stage}}}
    spec: Manifest = {**together, "policyTypes": ["Ingress"], "ingress": [{"from": [together]}]}
    if settings.egress == "restricted":
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": [{"to": [together]}]}
    return policy(function.job, gang_policy_name(function.job.name, function.stage), spec)


def service(function: StageFunction, settings: ClusterSettings) -> Manifest:
    """Return the Knative Service of a stage.

    Only its Revision's `min-scale` and `max-scale` scale it. Its scaling metric is requests per second, which is almost
    zero for requests that last minutes and so adds no pods. With concurrency as the metric, Knative would keep the last
    pod for a window after its last request.
    """
    labels = job_selector(function.job.name) | {STAGE_LABEL: function.stage}
    slots = function.slots
    turns = {POOL: slots.pool, GPUS: str(slots.gpus)} if slots is not None else {}
    timeout = math.ceil(settings.request_timeout)
    template = {
        "metadata": {
            "labels": labels | ({TURNS_LABEL: "true"} if turns else {}),
            "annotations": turns
            | {
                "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
                "autoscaling.knative.dev/initial-scale": str(settings.initial_scale),
                MIN_SCALE: "0",
                MAX_SCALE: "1",
                "autoscaling.knative.dev/metric": "rps",
                "autoscaling.knative.dev/target": "1000",
                "autoscaling.knative.dev/target-utilization-percentage": "100",
                "autoscaling.knative.dev/target-burst-capacity": "-1",
                "autoscaling.knative.dev/window": "6s",
                "autoscaling.knative.dev/scale-to-zero-pod-retention-period": "0s",
                # Without it, one stream in four broke: if queue-proxy has not read the whole request when the first
                # event comes, Go's HTTP/1 server stops reading, and its proxy gives up.
                "features.knative.dev/http-full-duplex": "Enabled",
                "serving.knative.dev/progress-deadline": f"{math.ceil(settings.start_timeout)}s",
            },
        },
        "spec": _pod_spec(function, settings)
        | {"containerConcurrency": 1, "timeoutSeconds": timeout, "responseStartTimeoutSeconds": timeout},
    }
    return cluster_local_service(function.job, function.name, labels, template, function.pods)


def cluster_local_service(
    job: JobIdentity, name: str, labels: Mapping[str, str], template: Manifest, pods: PodsSpec
) -> Manifest:
    """Return a Knative Service without an address outside the cluster.

    Args:
        template: of its pods, under the job's own (`PodsSpec.template`).
    """
    visible = {**labels, "networking.knative.dev/visibility": "cluster-local"}
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": metadata_of(job, name, visible),
        "spec": {"template": overlay(template, pods.template or {})},
    }


def threads_of(resources: ResourcesSpec | None) -> int:
    """Return the CPU threads of an instance: its CPU limit or request, rounded up; 1 if it has neither."""
    given = (resources or ResourcesSpec()).limits or {}, (resources or ResourcesSpec()).requests or {}
    cpu = next((amounts["cpu"] for amounts in given if "cpu" in amounts), "1")
    cores = Decimal(cpu.removesuffix(_CPU_SUFFIX)) / (1000 if cpu.endswith(_CPU_SUFFIX) else 1)
    return max(1, math.ceil(cores))


def _pod_spec(function: StageFunction, settings: ClusterSettings) -> Manifest:
    container: Manifest = {
        "name": CONTAINER,
        "image": function.pods.image or settings.functions_image,
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "env": _env(function),
        "readinessProbe": {"httpGet": {"path": "/readyz"}, "periodSeconds": 1, "timeoutSeconds": 5},
        "livenessProbe": {
            "httpGet": {"path": "/healthz"},
            "periodSeconds": 20,
            "timeoutSeconds": 10,
            "failureThreshold": 6,
            "initialDelaySeconds": 60,
        },
    }
    return pod_spec(container, function.pods, function.slots)


def pod_spec(container: Manifest, pods: PodsSpec, slots: SlotsWanted | None = None) -> Manifest:
    """Return the spec of a pod: a container without privileges, with the job's settings of its pods."""
    volumes = [(volume.name or f"volume-{number}", volume) for number, volume in enumerate(pods.volumes or [])]
    shared_memory: Manifest = {"medium": "Memory"}
    if pods.shared_memory is not None:
        shared_memory["sizeLimit"] = str(pods.shared_memory)
    container = {
        **container,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": "rlhfless-tmp", "mountPath": "/tmp"},
            {"name": "rlhfless-shm", "mountPath": "/dev/shm"},
            *(_mount(name, volume) for name, volume in volumes),
        ],
    }
    if pods.resources is not None:
        container["resources"] = _resources(pods.resources, slots)
    if pods.env_from:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.env_from]
    spec: Manifest = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [
            {"name": "rlhfless-tmp", "emptyDir": {}},
            {"name": "rlhfless-shm", "emptyDir": shared_memory},
            *({"name": name, **_source(volume)} for name, volume in volumes),
        ],
    }
    optional = {
        "imagePullSecrets": [{"name": name} for name in pods.image_pull_secrets or []],
        "nodeSelector": pods.node_selector,
        "tolerations": [each.model_dump(by_alias=True, exclude_none=True) for each in pods.tolerations or []],
        "affinity": pods.affinity,
        "priorityClassName": pods.priority_class,
        "runtimeClassName": pods.runtime_class,
    }
    return spec | {key: value for key, value in optional.items() if value}


def _env(function: StageFunction) -> list[Manifest]:
    plain = {"HOME": "/tmp", "RLHFLESS_THREADS": str(threads_of(function.pods.resources)), **function.env}
    plain |= function.pods.env or {}
    plain |= {"RLHFLESS_STAGE": function.stage, "RLHFLESS_PRELOAD": function.preload}
    return [
        token_variable(function.job),
        *({"name": name, "value": value} for name, value in sorted(plain.items())),
    ]


def token_variable(job: JobIdentity) -> Manifest:
    """Return the environment variable with the job's token."""
    reference = {"name": secret_name(job.name), "key": TOKEN_KEY}
    return {"name": "RLHFLESS_TOKEN", "valueFrom": {"secretKeyRef": reference}}


def _resources(resources: ResourcesSpec, slots: SlotsWanted | None) -> Manifest:
    asked: Manifest = resources.model_dump(by_alias=True, exclude_none=True)
    if slots is not None:
        for amounts in asked.values():
            amounts.pop(slots.resource, None)
    return asked


def _mount(name: str, volume: VolumeSpec) -> Manifest:
    mount: Manifest = {"name": name, "mountPath": volume.mount_path, "readOnly": volume.read_only}
    return mount if volume.sub_path is None else mount | {"subPath": volume.sub_path}


def _source(volume: VolumeSpec) -> Manifest:
    if volume.claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.claim, "readOnly": volume.read_only}}
    if volume.host_path is not None:
        return {"hostPath": {"path": volume.host_path}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret}}
    return {"configMap": {"name": volume.config_map}}


def policy(job: JobIdentity, name: str, spec: Manifest) -> Manifest:
    """Return a NetworkPolicy of a job."""
    metadata = metadata_of(job, name)
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def metadata_of(job: JobIdentity, name: str, labels: Mapping[str, str] | None = None) -> Manifest:
    """Return the metadata of an object that belongs to a job."""
    owner = {
        "apiVersion": job.api_version,
        "kind": job.kind,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": dict(labels or job_selector(job.name)),
        "ownerReferences": [owner],
    }


def from_namespace(name: str) -> Manifest:
    """Return the source of connections from a namespace's pods."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
