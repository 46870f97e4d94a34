"""The work of an asynchronous run, and its outcome: groups, shares, steps and their staleness."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless_functions.data.turns import TracedResponse
from rlhfless_operator.planner.groups.staleness import staleness
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.simulator.episode import Episode
from rlhfless_operator.simulator.instance import Instance, Response
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.traces import RecordedTrace, Trace


@dataclass(frozen=True, slots=True)
class Group:
    """One visit of a prompt."""

    number: int
    """Number from 0, in the order in which prompts are drawn."""
    prompt: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Sampled tokens of each response."""
    acted: tuple[TracedResponse, ...] = ()
    """Turns of each response; empty without an environment."""

    @property
    def tokens(self) -> int:
        """Tokens of all samples, prompts included."""
        return self.prompt_tokens * len(self.lengths) + sum(self.lengths) + sum(each.given for each in self.acted)

    def responses(self) -> list[Response]:
        """Return fresh responses. Their prompt is the visit's number, because new weights void old keys and values."""
        return [
            Response(self.number, index, self.prompt_tokens, length, episode=episode_of(self.acted, index))
            for index, length in enumerate(self.lengths)
        ]


def episode_of(acted: Sequence[TracedResponse], index: int) -> Episode | None:
    """Return the fresh episode of a response; None if it acts in no environment."""
    return Episode(acted[index]) if acted else None


ShareEnds = Sequence[tuple[float, int]]
"""Ends of a share's responses, in order: seconds since its instance has the weights, and the response's group."""


def share_ends(responses: Iterable[Response], profile: InstanceProfile, sequences: int) -> ShareEnds:
    """Return the ends of an actor's responses if they are not interrupted.

    Args:
        responses: in the order of admission; the run changes them.
        sequences: most sequences that the instance decodes at a time.
    """
    instance = Instance("actor", profile.latency, 0.0, max_batch=sequences, kv_tokens=profile.kv_tokens)
    instance.add(list(responses))
    return [(end, number) for end, (number, _) in instance.advance(1e12)]


@dataclass(frozen=True)
class StepShares:
    """The division of a rollout."""

    shares: Sequence[ShareEnds]
    """Share of each actor, the longest expected time first."""
    preparers: int = 1
    """Most instances that prepare its groups at a time, if there are instances that only prepare."""


def draw_steps(scenario: Scenario, trace: Trace | RecordedTrace, seed: int) -> Iterator[list[Group]]:
    """Yield the groups of each step, without end: after its last step the trace begins anew."""
    random = np.random.default_rng(seed)
    numbers = itertools.count()
    while True:
        for step in trace.steps(scenario.prompts_per_step, random):
            yield [
                Group(
                    *(next(numbers), prompt, int(trace.prompt_tokens[prompt]), tuple(lengths)),
                    tuple(step.acted[prompt, index] for index in range(len(lengths)) if step.acted),
                )
                for prompt, lengths in step.lengths.items()
            ]


@dataclass(frozen=True)
class Step:
    """A training step."""

    end: float
    """Moment at which the version that it made was there."""
    groups: tuple[Group, ...]
    versions: tuple[int, ...]
    """Version that began each group."""


def staleness_of(number: int, step: Step) -> list[int]:
    """Return the staleness of each group of a step, by its oldest token.

    Args:
        number: of the step, from 1.
    """
    return [staleness(number, version) for version in step.versions]


@dataclass(frozen=True)
class Outcome:
    """A run from its beginning to the end of its last step."""

    steps: tuple[Step, ...]
    generation_busy: float
    """GPU-seconds of prefill and decode."""
    generation_held: float
    """GPU-seconds."""
    learner_busy: float
    """GPU-seconds of learning, and of preparation if the learner's GPUs do it."""
    learner_held: float
    """GPU-seconds."""
    preparer_held: float = 0.0
    """GPU-seconds of instances that only prepare."""
    left: tuple[tuple[Group, int], ...] = ()
    """Groups of ours that were begun and that no finished step has learnt from, with the version that began them."""
    dropped: int = 0
    """Number of times that a group of ours was dropped, to be generated anew."""

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return self.steps[-1].end

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds held by all stages."""
        return self.generation_held + self.learner_held + self.preparer_held

    @property
    def staleness(self) -> list[int]:
        """Staleness of each group that was learnt from, by its oldest token."""
        return [each for number, step in enumerate(self.steps, start=1) for each in staleness_of(number, step)]
