"""The manifests of the servers of a job's environment on a cluster: pure functions.

Knative scales them with the open sessions. It knows nothing of who needs a session when it removes pods, so the job
holds all pods while its samples act (`environment_pods`).
"""

import math
from dataclasses import dataclass

from rlhfless_functions.settings import OpenEnvEnvironment
from rlhfless_operator.job.pods import PodsSpec, merge_pods
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import (
    CONTAINER,
    MAX_SCALE,
    MIN_SCALE,
    STAGE_LABEL,
    JobIdentity,
    Manifest,
    cluster_local_service,
    from_namespace,
    job_selector,
    pod_spec,
    policy,
    service_name,
)

_PORT = 8000
_MOST_CONTAINERS = 16


@dataclass(frozen=True)
class EnvironmentFunction:
    """The servers of one job's environment."""

    job: JobIdentity
    server: OpenEnvEnvironment
    pods: PodsSpec
    """The environment's settings over where the cluster's pods run."""

    @property
    def name(self) -> str:
        """Name of the Knative Service."""
        return service_name(self.job.name, "environment")

    @property
    def most(self) -> int:
        """Most pods."""
        return self.server.containers or _MOST_CONTAINERS


def environment_pods(own: PodsSpec, defaults: PodsSpec) -> PodsSpec:
    """Return the settings of an environment's pods: its own, and of the cluster's defaults only where pods run. The
    others give access to stores and their secrets."""
    places = ("image_pull_secrets", "node_selector", "tolerations", "affinity", "priority_class", "runtime_class")
    given = {name: getattr(defaults, name) for name in places}
    return merge_pods(PodsSpec(**given), own)


def environment_policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy of a job's environment."""
    return f"{job}-environment"


def environment_policy(job: JobIdentity, settings: ClusterSettings) -> Manifest:
    """Return the policy that lets only Knative's pods reach the servers. Restricted ones reach nothing."""
    pods = {"matchLabels": job_selector(job.name) | {STAGE_LABEL: "environment"}}
    spec: Manifest = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [from_namespace(settings.knative_namespace)]}],
    }
    if settings.egress == "restricted":
        spec |= {"policyTypes": ["Ingress", "Egress"], "egress": []}
    return policy(job, environment_policy_name(job.name), spec)


def environment_service(function: EnvironmentFunction, settings: ClusterSettings) -> Manifest:
    """Return the Knative Service: a pod for each so many open WebSockets, and none without any.

    The activator stays between them, which lets a session wait until a pod has room. Pods know nothing of the job: no
    token, no store.
    """
    server, labels = function.server, job_selector(function.job.name) | {STAGE_LABEL: "environment"}
    sessions = server.sessions or 1
    timeout = math.ceil(settings.request_timeout)
    template: Manifest = {
        "metadata": {
            "labels": labels,
            "annotations": {
                "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
                "autoscaling.knative.dev/initial-scale": str(settings.initial_scale),
                MIN_SCALE: "0",
                MAX_SCALE: str(function.most),
                "autoscaling.knative.dev/metric": "concurrency",
                "autoscaling.knative.dev/target": str(sessions),
                "autoscaling.knative.dev/target-utilization-percentage": "100",
                "autoscaling.knative.dev/target-burst-capacity": "-1",
                "autoscaling.knative.dev/window": "6s",
                "serving.knative.dev/progress-deadline": f"{math.ceil(settings.start_timeout)}s",
            },
        },
        "spec": pod_spec(_container(function, settings), function.pods)
        # A WebSocket is one request, and its answer begins when it ends.
        | {"containerConcurrency": sessions, "timeoutSeconds": timeout, "responseStartTimeoutSeconds": timeout},
    }
    return cluster_local_service(function.job, function.name, labels, template, function.pods)


def _container(function: EnvironmentFunction, settings: ClusterSettings) -> Manifest:
    server, port = function.server, function.server.port or _PORT
    env = {"HOME": "/tmp", "HOST": "0.0.0.0", "MAX_CONCURRENT_ENVS": str(server.sessions or 1)}
    env |= function.pods.env or {}
    container: Manifest = {
        "name": CONTAINER,
        "image": server.image or settings.functions_image,
        # Knative sets PORT.
        "ports": [{"containerPort": port, "protocol": "TCP"}],
        "env": [{"name": name, "value": value} for name, value in sorted(env.items())],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1, "timeoutSeconds": 5},
    }
    return container if server.command is None else {**container, "command": list(server.command)}
