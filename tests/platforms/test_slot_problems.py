"""What a job says when its slots can't be had: a real API server with its ResourceClaims, and an emulated Knative."""

from typing import Any

import pytest

from rlhfless_operator.knative import ForbiddenError
from rlhfless_operator.platforms.base import PlatformUnavailableError
from rlhfless_operator.platforms.turns import slot_pool
from rlhfless_operator.platforms.turns.slot_claims import CLAIMS, claim
from tests.platforms.emulated_cluster import server as server  # The fixture.
from tests.platforms.knative_jobs import until
from tests.platforms.slotted_cluster import SlottedCluster, told
from tests.platforms.slotted_cluster import cluster as cluster  # The fixture.
from tests.prerequisites import needs_api_server

pytestmark = needs_api_server("no claims are made")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 4, "largest": 2}, "requests 2 GPUs, but pool default allocates 1 together on a node; request fewer"),
        ({"gpus": 4, "elsewhere": 4}, "has no GPUs of pool default; add it to the pool's namespaces"),
    ],
)
async def test_a_job_that_can_never_have_its_slots_is_told_so(
    cluster: SlottedCluster, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlatformUnavailableError, match=message):
        async with cluster.job(slots=cluster.slots(**options)):
            pass


@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("0/1 nodes are available: 1 cannot allocate all claims.", "lower the pool's gpus to what its driver offers"),
        ("0/1 nodes are available: request gpu: device class gpu.test does not exist.", "kubectl get deviceclasses"),
    ],
)
async def test_why_a_claim_is_not_allocated_is_told_in_the_schedulers_words(
    cluster: SlottedCluster, message: str, remedy: str
) -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    cluster.knative.pod_status = {"phase": "Pending", "conditions": [condition]}
    async with cluster.job(slots=cluster.slots()) as job:
        await job.platform.hold("generation", 1)
        await until(lambda: message in told(job) and remedy in told(job), lambda: job.problems)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("missing", "Pending: it names ResourceClaims that are not there: rlhfless-default-1-0"),
        ("ending", "Pending: it names ResourceClaims that are being deleted: rlhfless-default-0-0"),
        ("there", "Pending: the scheduler has not looked at it, though its ResourceClaims are there"),
    ],
)
async def test_a_pod_of_which_the_scheduler_says_nothing_is_told_of(
    cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    monkeypatch.setattr(slot_pool, "_REVIEW_SECONDS", 0.2)
    claims = cluster.client.resource(CLAIMS)
    one = cluster.slots(1)
    # This one is not made again: the pool of the test has one slot.
    other = claim(cluster.namespace, "default", "gpu.test", 1, 0)
    cluster.knative.pod_status = {"phase": "Pending"}
    async with cluster.job(slots=one) as job:
        if what == "missing":
            await claims.create(other)
            await claims.delete(cluster.namespace, "rlhfless-default-0-0")
        await job.platform.hold("generation", 1)
        (name,) = await job.until(1, "starting")
        if what == "missing":
            await claims.delete(cluster.namespace, "rlhfless-default-1-0")
        elif what == "ending":
            await claims.patch(cluster.namespace, "rlhfless-default-0-0", {"metadata": {"finalizers": ["test/in-use"]}})
            await claims.delete(cluster.namespace, "rlhfless-default-0-0")
        await until(lambda: f"generation: {name}: {message}; " in told(job), lambda: job.problems)
        if what == "ending":
            await claims.patch(cluster.namespace, "rlhfless-default-0-0", {"metadata": {"finalizers": None}})


async def test_claims_that_are_refused_later_are_told_of_until_they_are_there(
    cluster: SlottedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_pool, "_REVIEW_SECONDS", 0.1)
    refusal = ForbiddenError(403, "Forbidden", 'resourceclaims "x" is forbidden: exceeded quota: team')
    async with cluster.job(slots=(slots := cluster.slots())) as job:
        claims = slots.pool._division._claims
        create = claims.create

        async def refused(manifest: Any) -> Any:
            raise refusal

        monkeypatch.setattr(claims, "create", refused)
        await cluster.client.resource(CLAIMS).delete(cluster.namespace, "rlhfless-default-0-0")
        await until(lambda: "exceeded quota: team" in told(job), lambda: job.problems)
        assert "raise the quota" in told(job)
        assert told(job).startswith("slots: the slots of pool default in namespace")
        monkeypatch.setattr(claims, "create", create)
        await until(lambda: told(job) == "", lambda: job.problems)
