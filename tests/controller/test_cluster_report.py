"""What a job's user is told of the cluster: conditions made of findings and of pods' problems."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest

from rlhfless_functions.api import Event, Preload, RunRequest, Stage
from rlhfless_operator.controller.cluster_report import PodsReport, Preflight, remedy_of, tell_findings
from rlhfless_operator.controller.conditions import Reason
from rlhfless_operator.job.resource_status import ConditionType
from rlhfless_operator.platforms.base import PlatformUnavailableError, StateChange
from rlhfless_operator.platforms.job_platform import JobPlatform
from rlhfless_operator.platforms.pool_member import PoolMember
from rlhfless_operator.preflight import Finding

MEMBER = PoolMember("uid", "team", "job", {})
FULL = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


@dataclass
class Told:
    """What a job was told, the newest last."""

    conditions: list[tuple[str, bool, Reason, str]] = field(default_factory=list)

    def __call__(self, kind: ConditionType, true: bool, reason: Reason, message: str) -> None:
        self.conditions.append((kind, true, reason, message))


def change(state: str, stage: Stage = "generation", instance: str = "a") -> StateChange:
    return StateChange(instance, stage, state, 0.0)  # type: ignore[arg-type]


def test_a_problem_is_told_with_its_remedy_until_a_pod_of_the_stage_is_ready() -> None:
    told = Told()
    report = PodsReport(told)
    report.changed(change("starting"))
    report.trouble(f"generation: a: Unschedulable: {FULL}")
    kind, true, reason, message = told.conditions[-1]
    assert (kind, true, reason) == ("PodsHealthy", False, Reason.PODS_FAIL)
    assert message.startswith("generation: a: Unschedulable: 0/3") and "generation.instances.max" in message
    report.changed(change("starting", "learning", "b"))
    report.changed(change("idle", "learning", "b"))
    assert told.conditions[-1][1] is False, "another stage's pods say nothing of this one's"
    report.changed(change("idle"))
    assert told.conditions[-1] == ("PodsHealthy", True, Reason.PODS_WORK, "")


def test_pods_that_were_ready_before_mend_nothing_and_nothing_is_told_twice() -> None:
    told = Told()
    report = PodsReport(told)
    for state in ("starting", "idle", "busy", "idle"):
        report.changed(change(state))
    report.trouble("generation: b: CrashLoopBackOff: back-off")
    for state in ("busy", "idle", "draining", "ended"):
        report.changed(change(state))
    report.trouble("generation: b: CrashLoopBackOff: back-off")
    assert [true for _, true, _, _ in told.conditions] == [True, False]


def test_a_pod_that_ends_before_it_is_ready_mends_nothing() -> None:
    told = Told()
    report = PodsReport(told)
    report.changed(change("starting"))
    report.trouble("generation: a: ErrImagePull: not found")
    report.changed(change("ended"))
    assert told.conditions[-1][1] is False


def test_a_pod_that_takes_turns_is_ready_when_it_sleeps() -> None:
    told = Told()
    report = PodsReport(told)
    report.changed(change("starting"))
    report.trouble(f"generation: a: Unschedulable: {FULL}")
    report.changed(change("asleep"))
    assert told.conditions[-1] == ("PodsHealthy", True, Reason.PODS_WORK, "")


def test_pods_that_are_ready_do_not_hide_one_that_waits() -> None:
    """As where a pool has more GPUs than there are."""
    told = Told()
    report = PodsReport(told)
    for name in ("a", "b"):
        report.changed(change("starting", instance=name))
    report.trouble("generation: b: Unschedulable: 0/1 nodes are available: 1 cannot allocate all claims.")
    report.changed(change("asleep"))
    assert told.conditions[-1][1] is False
    report.changed(change("asleep", instance="b"))
    assert told.conditions[-1][1] is True


def test_slots_have_a_problem_until_they_are_told_to_have_none() -> None:
    told = Told()
    report = PodsReport(told)
    report.changed(change("starting"))
    report.trouble("slots: ResourceClaims are being deleted: rlhfless-default-0-0; their pods follow")
    report.changed(change("asleep"))
    kind, true, _, message = told.conditions[-1]
    assert (kind, true) == ("PodsHealthy", False)
    assert message.startswith("slots: ResourceClaims are being deleted: rlhfless-default-0-0")
    assert "kubectl describe resourceclaim" in message
    report.trouble("slots: ")
    assert told.conditions[-1] == ("PodsHealthy", True, Reason.PODS_WORK, "")


NO_CLASS = "0/1 nodes are available: request gpu: device class gpu.test does not exist."
CALLED = 'failed calling webhook "slots.rlhfless.io": failed to call webhook: connection refused'
DENIED = 'admission webhook "slots.rlhfless.io" denied the request: pool default has no 1 slots for a pod'
MISSING = "a: Pending: it names ResourceClaims that are not there: rlhfless-default-0-0"
FORBIDDEN = 'User "x" cannot create resource "resourceclaims" in API group "resource.k8s.io"'


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        (NO_CLASS, "kubectl get deviceclasses"),
        ("0/2 nodes are available: 1 Insufficient cpu, 1 cannot allocate all claims.", "kubectl get resourceslices"),
        ("0/2 nodes are available: 2 resourceclaim not available on the node.", "free resources there"),
        ("SchedulerError: status.reservedFor: Too many: 257: must have at most 256 items", "end other jobs"),
        (CALLED, "quickRelease.port"),
        (DENIED, "kubectl get resourceclaims"),
        ("a has no slots: the API server did not call the operator's webhook for it", "MutatingWebhookConfiguration"),
        (MISSING, "delete the pod"),
        ("a: Pending: the scheduler has not looked at it, though its ResourceClaims are there", "kube-scheduler"),
        ("a: Pending: its node has not prepared it for 15 s (its ResourceClaims: c)", "driver may not run on the node"),
        (FORBIDDEN, "rbac.create: true"),
        (FULL, "add nodes"),
        ("1 node(s) had untolerated taint {nvidia.com/gpu: present}", "spec.pods.tolerations"),
        ("0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector", "spec.pods.nodeSelector"),
        ("ImagePullBackOff: container function: back-off pulling image", "spec.pods.imagePullSecrets"),
        ("InvalidImageName: container function", "spec.pods.image"),
        ('CreateContainerConfigError: secret "s3" not found', "in this namespace"),
        ("CrashLoopBackOff: container function: back-off; OOMKilled, exit code 137", "limits.memory"),
        ("CrashLoopBackOff: container function: back-off; Error, exit code 1", "kubectl logs --previous"),
        ('pods "x" is forbidden: exceeded quota: team', "raise the quota"),
        ("something new", "kubectl describe pods"),
    ],
)
def test_each_problem_has_a_remedy(problem: str, remedy: str) -> None:
    assert remedy in remedy_of(problem)


def test_findings_become_one_condition_the_errors_first() -> None:
    told = Told()
    tell_findings([Finding("capacity", "ok", "enough"), Finding("definition", "unknown", "hidden")], told)
    warning = Finding("quota of team", "warning", "1 GPU is left", "Raise it.")
    tell_findings([warning], told)
    tell_findings([warning, Finding("knative/config-features", "error", "off", "kubectl patch")], told)
    assert told.conditions == [
        ("ClusterReady", True, Reason.PREFLIGHT_PASSED, ""),
        ("ClusterReady", True, Reason.PREFLIGHT_WARNED, "quota of team: 1 GPU is left\nRaise it."),
        (
            "ClusterReady",
            False,
            Reason.PREFLIGHT_FAILED,
            "knative/config-features: off\nkubectl patch\nquota of team: 1 GPU is left\nRaise it.",
        ),
    ]


class Platform:
    """A platform that says what is asked of it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    async def open(self) -> None:
        self.calls.append("open")
        if self.error is not None:
            raise self.error

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        self.calls.append(f"hold {stage} {count}")

    def run(self, request: RunRequest) -> AsyncGenerator[Event, None]:
        raise AssertionError("nothing is run here")

    async def close(self) -> None:
        self.calls.append("close")

    async def remove(self) -> None:
        self.calls.append("remove")


async def test_everything_is_passed_on() -> None:
    async def look() -> Sequence[Finding]:
        await asyncio.Event().wait()
        return []

    inner, told = Platform(), Told()
    platform = JobPlatform(inner, MEMBER, Preflight(look, told))
    await platform.open()
    await platform.hold("learning", 1)
    await platform.close()
    await platform.remove()
    assert inner.calls == ["open", "hold learning 1", "close", "remove"]
    assert told.conditions == [], "who closes waits for no preflight"


async def test_a_job_that_can_not_begin_is_told_first_what_the_preflight_finds() -> None:
    async def look() -> Sequence[Finding]:
        await asyncio.sleep(0)
        return [Finding("knative", "error", "there is none", "Install it.")]

    told = Told()
    platform = JobPlatform(Platform(PlatformUnavailableError("no Services")), MEMBER, Preflight(look, told))
    with pytest.raises(PlatformUnavailableError, match="no Services"):
        await platform.open()
    assert told.conditions == [("ClusterReady", False, Reason.PREFLIGHT_FAILED, "knative: there is none\nInstall it.")]


async def test_a_preflight_that_fails_does_no_harm() -> None:
    async def look() -> Sequence[Finding]:
        raise RuntimeError("a bug")

    inner, told = Platform(), Told()
    platform = JobPlatform(inner, MEMBER, Preflight(look, told))
    await platform.open()
    await asyncio.sleep(0)
    await platform.close()
    assert inner.calls == ["open", "close"] and told.conditions == []
