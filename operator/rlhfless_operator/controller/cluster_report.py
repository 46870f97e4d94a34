"""What a job's user should know of the cluster, as conditions: what the preflight finds, and what keeps pods from
working."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from rlhfless_functions.api import Event, RunRequest, Stage
from rlhfless_operator.controller import conditions
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.controller.context import ClusterPlatform, Tell
from rlhfless_operator.platforms.base import Preload, StateChange
from rlhfless_operator.preflight.findings import Finding

_logger = logging.getLogger(__name__)

_WAITING_SECONDS = 5.0
"""For the preflight, where what it looks at keeps a job from beginning."""
_REMEDIES = (
    (
        "device class .* does not exist",
        "install the driver of these GPUs, or mend deviceClass of the pool in the chart: kubectl get deviceclasses",
    ),
    (
        "cannot allocate all claims",
        "wait for GPUs that others have, add nodes with GPUs, or give the pool no more gpus than its driver offers:"
        " kubectl get resourceslices",
    ),
    (
        "resourceclaim not available on the node",
        "its GPU is on a certain node: make room there, or ask for less in spec.pods.resources",
    ),
    ("must have at most 256 items", "256 pods share its GPU: lower generation.instances.max, or end other jobs"),
    (
        "failed calling webhook .*slots.rlhfless.io",
        "see that the operator's pods run, and that API servers reach their port (quickRelease.port of the chart)",
    ),
    (
        "has no slots|slots.rlhfless.io.* denied the request",
        "see that the pool's claims are there (kubectl get resourceclaims), and that the chart's"
        " MutatingWebhookConfiguration has slots.rlhfless.io",
    ),
    (
        "ResourceClaims that are not there",
        "the operator makes those of its pools again within seconds; if they stay away, delete the pod: the next one"
        " gets others",
    ),
    (
        "ResourceClaims (that )?are being deleted",
        "a claim goes with its last pod, and is made again: kubectl describe resourceclaim says which pods it has",
    ),
    (
        "FailedPrepareDynamicResources",
        "see that the DRA driver of its GPUs runs on the pod's node; the pod starts once it does",
    ),
    ("FailedMount|FailedAttachVolume", "see that the volume it names is there, and can be mounted on its node"),
    (
        "its node has not prepared it",
        "read why: kubectl describe pod POD; its GPUs' driver may not run on the node, or a volume can't be mounted",
    ),
    ("the scheduler has not looked at it", "see that kube-scheduler runs: kubectl get pods --namespace kube-system"),
    ('cannot \\w+ resource "resourceclaims"', "grant it, as the chart does with rbac.create: true"),
    (
        "Insufficient memory",
        "wait for what is in use, add memory or nodes, or lower spec.pods.resources.requests.memory; of pods without"
        " a task on the same slots the operator ends one at a time, when a task waits for this one",
    ),
    ("Insufficient", "wait for what is in use, add nodes, or lower generation.instances.max"),
    ("untolerated taint", "tolerate the taint in spec.pods.tolerations"),
    ("didn't match Pod's node affinity", "mend spec.pods.nodeSelector or spec.pods.affinity: no node is like that"),
    ("unbound immediate PersistentVolumeClaims|persistentvolumeclaim .* not found", "make the claim in this namespace"),
    ("ImagePull|InvalidImageName", "mend spec.pods.image, or name its registry's Secret in spec.pods.imagePullSecrets"),
    ("CreateContainerConfigError", "make what it names in this namespace"),
    ("OOMKilled", "raise spec.pods.resources.limits.memory, or lower batch sizes"),
    ("exceeded quota", "raise the quota, or end other jobs"),
    ("CrashLoopBackOff|exit code", "read why: kubectl logs --previous --container function POD"),
)
"""What to do, by words of Kubernetes; the first that fits."""
_OTHERWISE = "see `kubectl describe pods --selector rlhfless.io/job=JOB`"


class PodsReport:
    """Keeps the condition `PodsHealthy` of one job.

    A stage has a problem from the moment that one is told until a pod of it has become ready, and none that the problem
    names is starting still. Slots have one until they are told to have none.

    Args:
        tell: sets conditions.
    """

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._problems: dict[str, str] = {}
        self._starting: set[str] = set()
        self._told: str | None = None

    def trouble(self, problem: str) -> None:
        """What keeps pods from working, after the stage's name, or `slots`, and a colon; nothing is over."""
        about, _, message = problem.partition(": ")
        if message:
            self._problems[about] = message
        else:
            self._problems.pop(about, None)
        self._publish()

    def changed(self, change: StateChange) -> None:
        """An instance has entered a state."""
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
    """What to do about a pod's problem, in Kubernetes' words."""
    return next((remedy for words, remedy in _REMEDIES if re.search(words, problem)), _OTHERWISE)


def tell_findings(findings: Sequence[Finding], tell: Tell) -> None:
    """Make the condition `ClusterReady` of what a preflight found. What could not be looked at is not in it."""
    errors = [finding for finding in findings if finding.verdict == "error"]
    warnings = [finding for finding in findings if finding.verdict == "warning"]
    lines = [
        "\n".join(filter(None, (f"{finding.check}: {finding.message}", finding.remedy)))
        for finding in (*errors, *warnings)
    ]
    reason = Reason.PREFLIGHT_FAILED if errors else Reason.PREFLIGHT_WARNED if warnings else Reason.PREFLIGHT_PASSED
    tell(conditions.CLUSTER_READY, not errors, reason, "\n".join(lines))


class ObservedPlatform:
    """Looks at the cluster while another platform opens.

    Args:
        platform: which.
        look: the preflight for its job.
        tell: sets conditions of the job.
    """

    def __init__(self, platform: ClusterPlatform, look: Callable[[], Awaitable[Sequence[Finding]]], tell: Tell) -> None:
        self._platform = platform
        self._look = look
        self._tell = tell
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """As the platform does. Where it fails, what the preflight found is told first."""
        self._looking = asyncio.create_task(self._look_around())
        try:
            await self._platform.open()
        except Exception:
            await asyncio.wait({self._looking}, timeout=_WAITING_SECONDS)
            raise

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        """As the platform does."""
        await self._platform.hold(stage, count, preload)

    def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        """As the platform does."""
        return self._platform.run(request)

    async def close(self) -> None:
        """As the platform does."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._platform.close()

    async def remove(self) -> None:
        """As the platform does."""
        await self._platform.remove()

    async def _look_around(self) -> None:
        try:
            tell_findings(await self._look(), self._tell)
        except Exception:
            # A job goes on whatever the preflight comes to.
            _logger.exception("the preflight failed")
