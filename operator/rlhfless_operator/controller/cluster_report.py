"""Conditions that tell a job's user about the cluster: the findings of the preflight, and problems of pods."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason, Tell
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.job_platform import ClusterPlatform, Hook
from rlhfless_operator.preflight.findings import Finding

_logger = logging.getLogger(__name__)

_WAITING_SECONDS = 5.0
"""Time for the preflight when the cluster keeps a job from starting, in seconds."""
_REMEDIES = (
    (
        "device class .* does not exist",
        "install the driver of these GPUs, or correct the pool's deviceClass in the chart: kubectl get deviceclasses",
    ),
    (
        "cannot allocate all claims",
        "wait for GPUs in use, add nodes with GPUs, or lower the pool's gpus to what its driver offers:"
        " kubectl get resourceslices",
    ),
    (
        "resourceclaim not available on the node",
        "its GPU is on one node: free resources there, or lower spec.pods.resources",
    ),
    ("must have at most 256 items", "256 pods share its GPU: lower generation.instances.max, or end other jobs"),
    (
        "failed calling webhook .*slots.rlhfless.io",
        "check that the operator's pods run and the API server reaches their port (quickRelease.port of the chart)",
    ),
    (
        "has no slots|slots.rlhfless.io.* denied the request",
        "check that the pool's claims exist (kubectl get resourceclaims), and that the chart's"
        " MutatingWebhookConfiguration has slots.rlhfless.io",
    ),
    (
        "ResourceClaims that are not there",
        "the operator creates its pools' claims again within seconds; if they stay missing, delete the pod: the next"
        " one gets others",
    ),
    (
        "ResourceClaims (that )?are being deleted",
        "a claim is deleted with its last pod and created again: kubectl describe resourceclaim lists its pods",
    ),
    (
        "FailedPrepareDynamicResources",
        "check that the DRA driver of its GPUs runs on the pod's node; the pod starts once it does",
    ),
    ("FailedMount|FailedAttachVolume", "check that the volume exists and can be mounted on its node"),
    (
        "its node has not prepared it",
        "see kubectl describe pod POD; its GPUs' driver may not run on the node, or a volume can't be mounted",
    ),
    ("the scheduler has not looked at it", "check that kube-scheduler runs: kubectl get pods --namespace kube-system"),
    ('cannot \\w+ resource "resourceclaims"', "grant the permission, as the chart does with rbac.create: true"),
    (
        "Insufficient memory",
        "wait until memory is free, add memory or nodes, or lower spec.pods.resources.requests.memory; when a task"
        " waits for this pod, the operator ends idle pods on the same slots, one at a time",
    ),
    ("Insufficient", "wait until resources are free, add nodes, or lower generation.instances.max"),
    ("untolerated taint", "tolerate the taint in spec.pods.tolerations"),
    ("didn't match Pod's node affinity", "correct spec.pods.nodeSelector or spec.pods.affinity: no node matches"),
    (
        "unbound immediate PersistentVolumeClaims|persistentvolumeclaim .* not found",
        "create the claim in this namespace",
    ),
    (
        "ImagePull|InvalidImageName",
        "correct spec.pods.image, or name its registry's Secret in spec.pods.imagePullSecrets",
    ),
    ("CreateContainerConfigError", "create the missing object in this namespace"),
    ("OOMKilled", "raise spec.pods.resources.limits.memory, or lower batch sizes"),
    ("exceeded quota", "raise the quota, or end other jobs"),
    ("CrashLoopBackOff|exit code", "see kubectl logs --previous --container function POD"),
)
"""Remedies, by patterns of Kubernetes' messages; the first match counts."""
_OTHERWISE = "see `kubectl describe pods --selector rlhfless.io/job=JOB`"


class PodsReport:
    """Keeps the condition `PodsHealthy` of one job.

    A stage's problem lasts until one of its pods becomes ready and no pod that the problem names is still starting. A
    problem of slots lasts until `trouble` reports that it is over.

    Args:
        tell: sets conditions.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._problems: dict[str, str] = {}
        self._starting: set[str] = set()
        self._told: str | None = None

    def trouble(self, problem: str) -> None:
        """Report a problem as `STAGE: text` or `slots: text`; an empty text ends it."""
        about, _, message = problem.partition(": ")
        if message:
            self._problems[about] = message
        else:
            self._problems.pop(about, None)
        self._publish()

    def changed(self, change: StateChange) -> None:
        """Handle an instance's change of state."""
        if change.state == "starting":
            self._starting.add(change.instance)
        elif change.instance in self._starting:
            self._starting.remove(change.instance)
            problem = self._problems.get(change.stage, "")
            waiting = any(f"{name}: " in problem for name in self._starting)
            if change.state in ("idle", "busy", "asleep") and not waiting:
                self._problems.pop(change.stage, None)
                self._publish()

    def _publish(self) -> None:
        lines = [f"{about}: {problem}; {remedy_of(problem)}" for about, problem in sorted(self._problems.items())]
        message = "\n".join(lines)
        if message != self._told:
            self._told = message
            reason = Reason.PODS_FAIL if lines else Reason.PODS_WORK
            self._tell(conditions.PODS_HEALTHY, not lines, reason, message)


def remedy_of(problem: str) -> str:
    """Return the remedy for a pod's problem, which is in Kubernetes' words."""
    return next((remedy for words, remedy in _REMEDIES if re.search(words, problem)), _OTHERWISE)


def tell_findings(findings: Sequence[Finding], tell: Tell) -> None:
    """Set the condition `ClusterReady` from the findings of a preflight, without those that it could not check."""
    errors = [finding for finding in findings if finding.verdict == "error"]
    warnings = [finding for finding in findings if finding.verdict == "warning"]
    lines = [
        "\n".join(filter(None, (f"{finding.check}: {finding.message}", finding.remedy)))
        for finding in (*errors, *warnings)
    ]
    reason = Reason.PREFLIGHT_FAILED if errors else Reason.PREFLIGHT_WARNED if warnings else Reason.PREFLIGHT_PASSED
    tell(conditions.CLUSTER_READY, not errors, reason, "\n".join(lines))


class Preflight(Hook):
    """Runs the preflight while a platform opens.

    Args:
        look: runs the preflight for its job.
        tell: sets conditions of the job.
    """

    def __init__(self, look: Callable[[], Awaitable[Sequence[Finding]]], tell: Tell) -> None:
        self._look = look
        self._tell = tell
        self._looking: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def opening(self, platform: ClusterPlatform) -> AsyncIterator[None]:
        """Run the preflight. If the platform fails to open, set the condition with the findings first."""
        self._looking = asyncio.create_task(self._look_around())
        try:
            yield
        except Exception:
            await asyncio.wait({self._looking}, timeout=_WAITING_SECONDS)
            raise

    @asynccontextmanager
    async def closing(self) -> AsyncIterator[None]:
        """Cancel the preflight if it still runs."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        yield

    async def _look_around(self) -> None:
        try:
            tell_findings(await self._look(), self._tell)
        except Exception:
            # A failing preflight must not stop the job.
            _logger.exception("the preflight failed")
