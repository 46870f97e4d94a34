"""The split of instances in an asynchronous job, by the rates at which its stages work. Pure.

Generation and learning go on at the same time, so the slower one sets the pace. The rate of generation depends on how
many samples are decoded at a time, and staleness bounds that. Let a step have B groups, and let generation be at most
S steps ahead. When the learner is at work, at most S · B groups wait or are under way; when it is not, (S + 1) · B. On
average half a step's groups are complete and wait for the others. So in a period P, in which learning takes l,

    G = B · (S + 1/2 − l / P)

groups are generated at a time. If the learner begins with the first groups of a step, half a step's groups are learnt
already on average, and l is only the lag: the time from the last groups to their weights. Publishing counts in l, also
where the learner takes the next step meanwhile. Of a group, (sum of its lengths) / (its longest) samples are decoded on
average. That makes n samples on A actors. A pass with n / A samples takes τ seconds, and a step has W tokens. So
generation allows

    P = W · τ(n / A) / n

and besides it pays for prompts and for new weights. G rises with P, and this P falls as n rises, so there is one
solution. More actors have smaller batches, whose passes are shorter but cost more for each token.

Samples that are with their environments are generated, but not decoded. If a group's longest response takes d seconds
of decoding and is away for a seconds, the part d / (d + a) of them is in the batches.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from rlhfless_operator.planner.latency.linear import Latency
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.preparers import PreparerChoice, matching_preparers

STAYS = 0.05
"""Smallest gain, as a share, for which the number of actors changes. Measured rates vary."""
_BISECTIONS = 32
_ROUNDS = 8


@dataclass(frozen=True)
class StepWork:
    """The work of generating a step's groups."""

    groups: int
    tokens: float
    """Tokens of all responses."""
    prompt_tokens: float
    """Tokens of all prompts, each once."""
    running: float
    """Samples of a group that are decoded at a time, on average until its longest response ends."""
    context: float
    """Mean tokens in the context of a sample, over all passes."""
    group_samples: int
    """Most samples of a group."""
    longest: float = 0.0
    """Tokens of a group's longest response, on average."""
    away: float = 0.0
    """Seconds that samples of a group are with their environments until its last one ends, on average."""

    @classmethod
    def of(
        cls, loads: Sequence[SampleLoad], runaways: Mapping[int, float] | None = None, tail_tokens: float = 0.0
    ) -> Self:
        """Return the work of these samples.

        Args:
            runaways: share of each prompt's responses that are runaways, of which the samples may have none.
            tail_tokens: length of a runaway; 0 if there can be none.
        """
        prompts, numbers = np.unique([load.prompt for load in loads], return_inverse=True)
        lengths = np.array([max(1.0, load.expected_tokens) for load in loads])
        contexts = np.array([float(load.prompt_tokens) for load in loads])
        longest, first, away = np.zeros(len(prompts)), np.zeros(len(prompts)), np.zeros(len(prompts))
        np.maximum.at(away, numbers, np.array([load.away_seconds for load in loads]))
        np.maximum.at(longest, numbers, lengths)
        np.maximum.at(first, numbers, contexts)
        work = lengths * (contexts + lengths / 2)
        tokens, passed = float(lengths.sum()), float(work.sum())
        if tail_tokens:
            share = np.array([(runaways or {}).get(int(prompt), 0.0) for prompt in prompts])
            planned = np.bincount(numbers, lengths >= tail_tokens, len(prompts))
            unplanned = np.maximum(0.0, share * np.bincount(numbers) - planned)
            # The few that come keep their groups under way for long.
            longest += (1 - np.exp(-unplanned)) * np.maximum(0.0, tail_tokens - longest)
            more = float(unplanned.sum()) * tail_tokens
            tokens += more
            passed += more * (float(contexts.mean()) + tail_tokens / 2)
        return cls(
            groups=len(prompts),
            tokens=tokens,
            prompt_tokens=float(first.sum()),
            running=tokens / float(longest.sum()),
            context=passed / tokens,
            group_samples=int(np.bincount(numbers).max()),
            longest=float(longest.mean()),
            away=float(away.mean()),
        )

    def decoding(self, passes: Callable[[float], float], most: float) -> float:
        """Return the samples of an actor that are decoded at a time, of so many if none were with their environments.

        Args:
            passes: samples → seconds of a pass.
        """
        samples = most
        # A smaller batch is quicker, and so its samples are away for a larger part of the time.
        for _ in range(_ROUNDS if self.away else 0):
            decode = self.longest * passes(samples)
            samples = most * decode / (decode + self.away)
        return samples


@dataclass(frozen=True)
class Actors:
    """The instances that generate."""

    latency: Latency
    least: int
    most: int
    sequences: int | None = None
    """Most samples in the batch of one; None if unknown."""
    kv_tokens: int | None = None
    """Most tokens in the KV cache of one; None if unknown."""
    renewal_seconds: float = 0.0
    """Seconds for which each stands still for a step's weights."""
    recomputes: bool = False
    """Whether it then computes the contexts of its batch anew."""


@dataclass(frozen=True)
class Learner:
    """The instances that learn."""

    instances: int
    seconds: float
    """Seconds for which a step occupies the learner; 0 if unknown."""
    price: float = 1.0
    """Price of an instance in instances that generate."""
    lag: float | None = None
    """Those from a step's last groups on; None if the learner begins with all groups."""
    publishing: float = 0.0
    """Seconds from then until the weights are there, in which the learner takes the next step."""

    @property
    def pace(self) -> float:
        """Least seconds between two steps."""
        return max(self.seconds, self.publishing)


@dataclass(frozen=True)
class Preparers:
    """The instances that prepare."""

    work: float = 0.0
    """Instance-seconds of a step; 0 if unknown."""
    least: int = 1
    most: int = 1
    price: float = 1.0
    """Price of an instance in instances that generate."""


@dataclass(frozen=True)
class RateSplit:
    """Numbers of instances, and the pace that they allow."""

    actors: int
    places: int
    """Most samples in the batch of an actor, by their expected lengths."""
    sequences: int
    """The same, however long they are."""
    batch: float
    """Samples in it on average."""
    preparers: PreparerChoice
    seconds: float
    """Seconds between two steps."""
    cost: float
    """Instance-seconds of a step, in those of instances that generate."""
    generation: float
    """Least seconds between two steps that generation allows."""


def split_by_rates(
    work: StepWork,
    actors: Actors,
    learner: Learner,
    preparers: Preparers,
    *,
    steps_ahead: int,
    cost_weight: float,
    now: int | None = None,
) -> RateSplit:
    """Return the split with the least (1 − λ) · time / least time + λ · cost / least cost of a step.

    Args:
        steps_ahead: steps that generation may be ahead of the learner.
        cost_weight: λ of the job: 0 takes the fastest split, 1 the cheapest.
        now: number of actors at the moment. They stay where others are hardly better.
    """
    most = max(actors.least, min(actors.most, work.groups * work.group_samples))
    found = [_split(work, actors, count, learner, preparers, steps_ahead) for count in range(actors.least, most + 1)]
    fastest, cheapest = min(each.seconds for each in found), min(each.cost for each in found)

    def weighed(split: RateSplit) -> float:
        return (1 - cost_weight) * split.seconds / fastest + cost_weight * split.cost / cheapest

    # Of equal splits, the one with the fewest actors.
    best = min(found, key=lambda each: (round(weighed(each), 9), each.actors))
    staying = [each for each in found if each.actors == now]
    if staying and weighed(staying[0]) <= weighed(best) * (1 + STAYS) and not _is_waste(staying[0], best):
        return staying[0]
    return best


def _is_waste(split: RateSplit, best: RateSplit) -> bool:
    """Return whether fewer actors save much of time or cost, and none of the other is lost by it."""
    shares = split.seconds / best.seconds, split.cost / best.cost
    return best.actors < split.actors and min(shares) >= 1 - 1e-9 and max(shares) > 1 + STAYS


def _split(
    work: StepWork, actors: Actors, count: int, learner: Learner, preparers: Preparers, steps_ahead: int
) -> RateSplit:
    sequences = _sequences(work, actors, count, steps_ahead)
    places = sequences if actors.kv_tokens is None else max(1, min(sequences, int(actors.kv_tokens / work.context)))
    lag = (learner.seconds if learner.lag is None else learner.lag) + learner.publishing

    def passes(samples: float) -> float:
        line = actors.latency.at(samples, work.context)
        return line.step_seconds + samples * (line.sequence_seconds + line.context_seconds * work.context)

    def batch(period: float) -> float:
        groups = work.groups * (steps_ahead + 0.5 - min(1.0, lag / period))
        there = max(1 / count, groups * work.running / count)
        return min(float(places), work.decoding(passes, there))

    def least(period: float) -> float:
        samples = batch(period)
        decoding = work.tokens * passes(samples) / (samples * count)
        anew = samples * work.context if actors.recomputes else 0.0
        prefill = actors.latency.prefill_token_seconds * (work.prompt_tokens / count + anew)
        return decoding + prefill + actors.renewal_seconds

    generation = _fixed_point(least)
    prepare = _preparers(preparers, generation, learner.pace)
    seconds = max(generation, learner.pace, preparers.work / prepare.instances)
    held = count + prepare.instances * preparers.price + learner.instances * learner.price
    return RateSplit(
        count,
        places,
        sequences,
        batch(seconds),
        prepare,
        seconds,
        cost=seconds * held,
        generation=generation,
    )


def _preparers(preparers: Preparers, generation: float, learning: float) -> PreparerChoice:
    """Return the fewest preparers that hold nothing up."""
    if not preparers.work:
        # One rollout after the other would wait for too few.
        return PreparerChoice(preparers.most, "the most, because what preparation takes is not measured yet")
    return matching_preparers(
        preparers.work, generation=generation, learning=learning, least=preparers.least, most=preparers.most
    )


def _sequences(work: StepWork, actors: Actors, count: int, steps_ahead: int) -> int:
    """Return the room in each batch: for all groups that may be under way, as far as an engine takes so many."""
    sequences = math.ceil((steps_ahead + 1) * work.groups * work.group_samples / count)
    return max(1, sequences if actors.sequences is None else min(sequences, actors.sequences))


def _fixed_point(least: Callable[[float], float]) -> float:
    """Return the period that generation allows if it is the period of the job."""
    high = 1.0
    while least(high) > high:
        high *= 2
    low = high / 2 if high > 1 else 0.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if least(middle) > middle else (low, middle)
    return high
