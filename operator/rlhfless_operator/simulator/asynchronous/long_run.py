"""The seconds between a job's steps in the long run, if every rollout has the same shares."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlhfless_operator.planner.groups.group_buffer import piece_size
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Share
from rlhfless_operator.simulator.asynchronous.job import StageSeconds, Use
from rlhfless_operator.simulator.asynchronous.shares_job import SharesJob, ends_of_shares
from rlhfless_operator.simulator.asynchronous.systems import Rollouts
from rlhfless_operator.simulator.asynchronous.work import Group, ShareEnds, StepShares, staleness_of

_STEPS = 24
"""Number of simulated steps. Only the second half counts: the beginning has no more effect then."""


@dataclass(frozen=True)
class LongRun:
    """Means of a step in the long run."""

    seconds: float
    """Seconds between two steps."""
    generation_seconds: float
    """Instance-seconds in which generation instances work, for each step."""
    generation_busy: float
    """Part of their time in which generation instances work."""
    learning_busy: float
    """Part of its time in which the learner works."""
    staleness: float
    """Mean number of versions between the weights that sampled a group and those that its step starts from."""


class _SameShares:
    """Plans that give every rollout these shares; their groups are numbered from 0."""

    def __init__(self, shares: Sequence[ShareEnds], preparers: int) -> None:
        self._shares, self._preparers = shares, preparers

    def plan(self, groups: Sequence[Group]) -> StepShares:
        """Return the shares of a rollout."""
        first = groups[0].number - groups[0].prompt
        shares = [[(end, first + number) for end, number in share] for share in self._shares]
        return StepShares(shares, self._preparers)

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn nothing about lengths."""


def long_run(
    shares: Sequence[Share],
    profile: InstanceProfile,
    sequences: int,
    max_staleness: int,
    *,
    learning: float,
    publishing: float,
    preparation: float,
    preparers: int,
    in_pieces: bool,
) -> LongRun:
    """Simulate an asynchronous job, and return the means of a step. A `max_staleness` of 0 is a synchronous job.

    Args:
        shares: of each rollout; every sample has its expected length.
        sequences: most sequences that an instance decodes at a time.
        learning: seconds of a step's learning until its weights are there.
        publishing: part of them in which the learner can take the next step.
        preparation: instance-seconds of a step's preparation.
        preparers: number of instances that prepare.
        in_pieces: whether the learner begins with the first groups of a step.
    """
    groups = _groups([sample for share in shares for sample in share.samples])
    numbers = {group.prompt: number for number, group in enumerate(groups)}
    renumbered = [Group(number, number, group.prompt_tokens, group.lengths) for number, group in enumerate(groups)]
    by_prompt = ends_of_shares(shares, groups, profile, sequences)
    ends = [[(end, numbers[prompt]) for end, prompt in share] for share in by_prompt]
    tokens = sum(group.tokens for group in groups)
    seconds = StageSeconds(
        weight_load=profile.weight_load_seconds,
        preparation_token=preparation / tokens,
        learning_token=(learning - publishing) / tokens,
        update=0.0,
        publishing=publishing,
    )
    job = SharesJob(
        Rollouts("long run", "a job", max_staleness),
        len(groups),
        seconds,
        _SameShares(ends, preparers),
        History(),
        _rollouts(renumbered),
        least=piece_size(len(groups)) if in_pieces else 0,
    )
    work = job.until(_STEPS)
    half = _STEPS // 2
    begin, end = work.steps[half - 1].end, work.steps[-1].end
    stale = [each for number, step in enumerate(work.steps, 1) if number > half for each in staleness_of(number, step)]

    def busy(uses: Sequence[Use]) -> float:
        return math.fsum(max(0.0, min(until, end) - max(since, begin)) for since, until in uses)

    return LongRun(
        seconds=(end - begin) / half,
        generation_seconds=busy(work.generation) / half,
        generation_busy=busy(work.generation) / (len(shares) * (end - begin)),
        learning_busy=busy(work.learning) / (end - begin),
        staleness=math.fsum(stale) / len(stale),
    )


def _groups(samples: Sequence[SampleLoad]) -> list[Group]:
    """Return the groups of a rollout, numbered by their prompts."""
    ordered = sorted(samples, key=lambda sample: (sample.prompt, sample.index))
    return [
        Group(prompt, prompt, each[0].prompt_tokens, tuple(max(1, round(sample.expected_tokens)) for sample in each))
        for prompt, each in ((key, list(found)) for key, found in itertools.groupby(ordered, lambda s: s.prompt))
    ]


def _rollouts(groups: Sequence[Group]) -> Iterator[list[Group]]:
    for rollout in itertools.count():
        first = rollout * len(groups)
        yield [Group(first + group.number, group.prompt, group.prompt_tokens, group.lengths) for group in groups]
