"""What is generated and learnt from, and what came of it: groups, steps and their staleness."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless_operator.planner.groups.staleness import staleness
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.simulator.instance import Instance, Response
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.traces import RecordedTrace, Trace


@dataclass(frozen=True, slots=True)
class Group:
    """One visit of a prompt."""

    number: int
    """From 0, by the order in which prompts are drawn."""
    prompt: int
    prompt_tokens: int
    lengths: tuple[int, ...]
    """Tokens of each response."""

    @property
    def tokens(self) -> int:
        """Of all samples, prompts included."""
        return self.prompt_tokens * len(self.lengths) + sum(self.lengths)

    def responses(self) -> list[Response]:
        """Fresh ones. Their prompt is the visit's number, since new weights make old keys and values useless."""
        return [Response(self.number, index, self.prompt_tokens, length) for index, length in enumerate(self.lengths)]


ShareEnds = Sequence[tuple[float, int]]
"""When the responses of a share end, in order: seconds since its instance has the weights, and the response's group."""


def share_ends(responses: Iterable[Response], profile: InstanceProfile, sequences: int) -> ShareEnds:
    """When the responses of an actor end that is left alone.

    Args:
        responses: in the order of admission; they are used up.
        sequences: most that the instance decodes at a time.
    """
    instance = Instance("actor", profile.latency, 0.0, max_batch=sequences, kv_tokens=profile.kv_tokens)
    instance.add(list(responses))
    return [(end, number) for end, (number, _) in instance.advance(1e12)]


@dataclass(frozen=True)
class StepShares:
    """How a rollout is divided."""

    shares: Sequence[ShareEnds]
    """Of each actor, those with the longest expected time first."""
    preparers: int = 1
    """Most instances that prepare its groups at a time, where any does nothing else."""


def draw_steps(scenario: Scenario, trace: Trace | RecordedTrace, seed: int) -> Iterator[list[Group]]:
    """The groups of each step, without end: after its last step the trace begins anew."""
    random = np.random.default_rng(seed)
    numbers = itertools.count()
    while True:
        for step in trace.steps(scenario.prompts_per_step, random):
            yield [
                Group(next(numbers), prompt, int(trace.prompt_tokens[prompt]), tuple(lengths))
                for prompt, lengths in step.lengths.items()
            ]


@dataclass(frozen=True)
class Step:
    """A training step."""

    end: float
    """When the version that it made was there."""
    groups: tuple[Group, ...]
    versions: tuple[int, ...]
    """Of each group, the weights that began it."""


def staleness_of(number: int, step: Step) -> list[int]:
    """Of each group of a step, by its oldest token.

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
    """GPU-seconds of learning, and of preparation where the learner's GPUs do it."""
    learner_held: float
    """GPU-seconds."""
    preparer_held: float = 0.0
    """GPU-seconds of instances that do nothing but prepare."""
    left: tuple[tuple[Group, int], ...] = ()
    """Groups of ours that were begun and that no finished step has learnt from, with the version that began them."""
    dropped: int = 0
    """How often a group of ours was dropped, to be generated anew."""

    @property
    def seconds(self) -> float:
        """Of the run."""
        return self.steps[-1].end

    @property
    def gpu_seconds(self) -> float:
        """Held by anyone."""
        return self.generation_held + self.learner_held + self.preparer_held

    @property
    def staleness(self) -> list[int]:
        """Of each group that was learnt from, by its oldest token."""
        return [each for number, step in enumerate(self.steps, start=1) for each in staleness_of(number, step)]
