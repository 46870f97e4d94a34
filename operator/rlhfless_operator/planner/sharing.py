"""How jobs that have their turn (`whole_gpus.py`) share a pool of GPUs: which of their instances may run now."""

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pool:
    """GPUs that jobs share."""

    gpus: int
    """GPUs of the pool."""
    namespaces: Mapping[str, int] = field(default_factory=dict)
    """Most GPUs of the pool that the jobs of a namespace hold at a time; all of them where it is not named."""


@dataclass(frozen=True)
class Claim:
    """What one stage of one job asks of the pool."""

    job: str
    """Unique id of the job."""
    stage: str
    """The stage; a job has at most one claim for each."""
    namespace: str
    """Namespace whose quota the job counts against."""
    gpus: int
    """GPUs of one instance."""
    working: int
    """Instances with a task. They are never taken away."""
    wanted: int
    """Instances that have a task, or one that waits for them."""
    kept: int = 0
    """Instances beyond these that are good to have: warmed for work to come, or kept with what they have loaded."""
    priority: int = 0
    """The higher comes first."""
    used: float = 0.0
    """GPU-seconds that the job has had lately; among equals the one that had least comes first."""


def share(claims: Sequence[Claim], pool: Pool) -> dict[tuple[str, str], int]:
    """How many instances each claim may have now.

    Working instances stay. Then GPUs go one instance at a time to the job of the highest priority, among equals to the
    one that holds the fewest GPUs: max-min fairness. Then come tasks that wait before instances that are kept (so a
    kept instance gives way to work of its own job, and to work of jobs that hold no more than its own, but a job within
    its fair part keeps its learner in memory), and at last whoever has used the fewest GPU-seconds.

    A job whose namespace is at its quota does not hold up the others; a task whose instance is larger than what is left
    does, or smaller ones would take what becomes free for ever. What needs no GPU is not held up at all.

    Raises:
        ValueError: an instance is larger than the pool or its namespace's quota, and could never run.
    """
    for claim in claims:
        check_feasible(claim, pool)
    sharers = [claim for claim in claims if claim.gpus]
    granted = {key_of(claim): claim.working for claim in sharers}
    held: dict[str, int] = defaultdict(int)
    in_namespace: dict[str, int] = defaultdict(int)
    for claim in sharers:
        held[claim.job] += claim.working * claim.gpus
        in_namespace[claim.namespace] += claim.working * claim.gpus
    free = pool.gpus - sum(held.values())

    def turn(claim: Claim, kept: bool) -> tuple[int, int, bool, float, str, str]:
        return -claim.priority, held[claim.job], kept, claim.used, claim.job, claim.stage

    hungry = [(turn(claim, False), claim, claim.wanted - claim.working) for claim in sharers]
    hungry += [(turn(claim, True), claim, claim.kept) for claim in sharers]
    hungry = [entry for entry in hungry if entry[2] > 0]
    heapq.heapify(hungry)
    while hungry:
        recorded, claim, more = heapq.heappop(hungry)
        kept = recorded[2]
        if recorded != turn(claim, kept):
            # Its job was given something since: its turn comes later now.
            heapq.heappush(hungry, (turn(claim, kept), claim, more))
            continue
        quota = pool.namespaces.get(claim.namespace)
        if quota is not None and in_namespace[claim.namespace] + claim.gpus > quota:
            continue
        if claim.gpus > free:
            if kept:
                continue
            break
        granted[key_of(claim)] += 1
        held[claim.job] += claim.gpus
        in_namespace[claim.namespace] += claim.gpus
        free -= claim.gpus
        if more > 1:
            heapq.heappush(hungry, (turn(claim, kept), claim, more - 1))
    return granted | {
        key_of(claim): max(claim.wanted, claim.working) + claim.kept for claim in claims if not claim.gpus
    }


def key_of(claim: Claim) -> tuple[str, str]:
    """What a claim is known by."""
    return claim.job, claim.stage


def check_feasible(claim: Claim, pool: Pool) -> None:
    """Return if an instance can run at all.

    Raises:
        ValueError: it is larger than the pool or its namespace's quota.
    """
    quota = min(pool.gpus, pool.namespaces.get(claim.namespace, pool.gpus))
    if claim.gpus > quota:
        raise ValueError(
            f"an instance of {claim.stage} asks for {claim.gpus} GPUs, and namespace {claim.namespace} may have {quota}"
            f" of the pool's {pool.gpus}: ask for fewer a pod, or raise the quota"
        )
