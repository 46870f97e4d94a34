"""The manifest of the process that keeps a job's episodes while its actors are let go: a pure function.

It is one pod on CPUs, which is there while a rollout needs it. It plays episodes as an actor would, so it has what
actors have: the job's token, its volumes and variables, and the network policy of the stages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlhfless_operator.job.pods import PodsSpec, ResourcesSpec, merge_pods
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.platforms.pods.manifests import (
    CONTAINER,
    MAX_SCALE,
    MIN_SCALE,
    PORT,
    STAGE_LABEL,
    JobIdentity,
    Manifest,
    cluster_local_service,
    job_selector,
    pod_spec,
    service_name,
    token_variable,
)

_RESOURCES = ResourcesSpec(requests={"cpu": "1", "memory": "1Gi"})
"""Requests of its pod, unless the job has others."""


@dataclass(frozen=True)
class ShelterFunction:
    """The shelter of one job."""

    job: JobIdentity
    pods: PodsSpec
    env: Mapping[str, str] = field(default_factory=dict)
    """More of rlhfless' own variables, as the stages have."""

    @property
    def name(self) -> str:
        """Name of the Knative Service."""
        return service_name(self.job.name, "shelter")


def shelter_pods(generation: PodsSpec, own: PodsSpec) -> PodsSpec:
    """Return the settings of a shelter's pod: those of actors without what brings them to a GPU, under the job's own.

    Args:
        generation: merged settings of the actors' pods.
        own: the settings of `environment.pods`; empty if they are of a server.
    """
    kept = ("image", "image_pull_secrets", "env", "env_from", "volumes", "priority_class")
    of_actors = {name: getattr(generation, name) for name in kept}
    return merge_pods(PodsSpec(**of_actors, resources=_RESOURCES), own)


def shelter_service(function: ShelterFunction, settings: ClusterSettings) -> Manifest:
    """Return the Knative Service: one pod while `min-scale` keeps it, and none otherwise. A request brings it."""
    labels = job_selector(function.job.name) | {STAGE_LABEL: "shelter"}
    timeout = math.ceil(settings.request_timeout)
    template: Manifest = {
        "metadata": {
            "labels": labels,
            "annotations": {
                "autoscaling.knative.dev/class": "kpa.autoscaling.knative.dev",
                "autoscaling.knative.dev/initial-scale": str(settings.initial_scale),
                MIN_SCALE: "0",
                # Episodes live in its memory.
                MAX_SCALE: "1",
                "autoscaling.knative.dev/target-burst-capacity": "-1",
                "autoscaling.knative.dev/window": "6s",
                "serving.knative.dev/progress-deadline": f"{math.ceil(settings.start_timeout)}s",
            },
        },
        "spec": pod_spec(_container(function, settings), function.pods)
        | {"containerConcurrency": 0, "timeoutSeconds": timeout, "responseStartTimeoutSeconds": timeout},
    }
    return cluster_local_service(function.job, function.name, labels, template, function.pods)


def _container(function: ShelterFunction, settings: ClusterSettings) -> Manifest:
    plain = {"HOME": "/tmp", **function.env, **(function.pods.env or {})}
    return {
        "name": CONTAINER,
        "image": function.pods.image or settings.functions_image,
        "command": ["python", "-m", "rlhfless_functions.environments.shelter"],
        # Knative sets PORT.
        "ports": [{"containerPort": PORT, "protocol": "TCP"}],
        "env": [
            token_variable(function.job),
            *({"name": name, "value": value} for name, value in sorted(plain.items())),
        ],
        "readinessProbe": {"httpGet": {"path": "/healthz"}, "periodSeconds": 1, "timeoutSeconds": 5},
    }
