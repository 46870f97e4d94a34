"""How jobs share a pool of GPUs: which of the instances that are asked for may run now."""

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
    """Instances that have a task, or one waiting for them, or are warmed for one."""
    kept: int = 0
    """Instances without work that are kept in case of more. Whoever has work comes first."""
    priority: int = 0
    """The higher comes first."""
    used: float = 0.0
    """GPU-seconds that the job has had lately; among equals the one that had least comes first."""


def share(claims: Sequence[Claim], pool: Pool) -> dict[tuple[str, str], int]:
    """How many instances each claim may have now.

    Working instances stay. Then GPUs go one instance at a time to the job of the highest priority that still wants one,
    among equals to the one that holds the fewest GPUs, then to the one that has used the fewest GPU-seconds: max-min
    fairness. A job whose namespace is at its quota does not hold up the others; an instance that is larger than what is
    left does, or smaller ones would take what becomes free for ever. Last come the idle instances that are merely kept.
    What needs no GPU is not held up at all.

    Raises:
        ValueError: an instance is larger than the pool or its namespace's quota, and could never run.
    """
    for claim in claims:
        _check_feasible(claim, pool)
    sharers = [claim for claim in claims if claim.gpus]
    granted = {
        key_of(claim): claim.working if claim.gpus else max(claim.wanted, claim.working) + claim.kept
        for claim in claims
    }
    held: dict[str, int] = defaultdict(int)
    in_namespace: dict[str, int] = defaultdict(int)
    for claim in claims:
        held[claim.job] += claim.working * claim.gpus
        in_namespace[claim.namespace] += claim.working * claim.gpus
    free = pool.gpus - sum(held.values())

    def give(limit: Mapping[tuple[str, str], int]) -> None:
        nonlocal free

        def turn(claim: Claim) -> tuple[int, int, float, str, str]:
            return -claim.priority, held[claim.job], claim.used, claim.job, claim.stage

        hungry = [(turn(claim), claim) for claim in sharers if granted[key_of(claim)] < limit[key_of(claim)]]
        heapq.heapify(hungry)
        while hungry:
            recorded, claim = heapq.heappop(hungry)
            if recorded != turn(claim):
                # Another stage of the job was given something since: its turn comes later now.
                heapq.heappush(hungry, (turn(claim), claim))
                continue
            quota = pool.namespaces.get(claim.namespace)
            if quota is not None and in_namespace[claim.namespace] + claim.gpus > quota:
                continue
            if claim.gpus > free:
                return
            granted[key_of(claim)] += 1
            held[claim.job] += claim.gpus
            in_namespace[claim.namespace] += claim.gpus
            free -= claim.gpus
            if granted[key_of(claim)] < limit[key_of(claim)]:
                heapq.heappush(hungry, (turn(claim), claim))

    wanted = {key_of(claim): max(claim.wanted, claim.working) for claim in sharers}
    give(wanted)
    if all(granted[key] == wanted[key] for key in wanted):
        give({key_of(claim): wanted[key_of(claim)] + claim.kept for claim in sharers})
    return granted


def key_of(claim: Claim) -> tuple[str, str]:
    """What a claim is known by."""
    return claim.job, claim.stage


def _check_feasible(claim: Claim, pool: Pool) -> None:
    quota = min(pool.gpus, pool.namespaces.get(claim.namespace, pool.gpus))
    if claim.wanted and claim.gpus > quota:
        raise ValueError(
            f"an instance of {claim.stage} asks for {claim.gpus} GPUs, and namespace {claim.namespace} may have {quota}"
            f" of the pool's {pool.gpus}: ask for fewer a pod, or raise the quota"
        )
