"""The systems that are compared, each as what it plans with, when it cuts, and what it may overlap and release.

Every baseline gets prefix caching within an instance, migration of running samples without stopping the receiver, and
instances released as soon as they are empty where it can release at all. Its ratio and batch here are those that
served it best on the first scenario (docs/research/simulation.md). Ours pays a pause of the receiver for
each cut, since an instance takes one request at a time; its engine's prefix cache keeps what the receiver had.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.moves.migration import Rule
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving
from rlhfless_operator.simulator.global_ratio import GlobalRatio
from rlhfless_operator.simulator.scenarios import Scenario

PolicyName = Literal["static", "rlhfuse", "rlhfuse-resident", "paper", "laminar", "oracle", "rlhfless"]

Told = Literal["division", "migration", "arrivals", "long", "short"]
"""What a policy may be told beforehand: the lengths that it divides by, those that its rule for moves goes by, when
groups are complete, the lengths of the long responses (`foresight.LONG`), and those of all others."""

RuleMaker = Callable[[Scenario, InstanceProfile, int, float], Rule]
"""(scenario, profile, samples, instance-seconds that a second is worth) → a step's rule."""


@dataclass(frozen=True)
class PolicySettings:
    """One system."""

    name: PolicyName
    stands_for: str
    planning: Literal["even", "ranked", "optimal"]
    """Even split of unsorted prompts; equal numbers of ranked prompts on the best number of actors; our planner."""
    lengths: Literal["ignored", "learnt"]
    told: frozenset[Told] = frozenset()
    """What it knows beforehand, instead of what it has learnt."""
    rule: RuleMaker | None = None
    holds_everything: bool = False
    """All GPUs are held for the whole step."""
    generating_share: float = 1.0
    """Part of the instances that generate, where everything is held; the GPUs of the others only prepare and learn."""
    drafts: bool = True
    """It drafts, in a scenario with drafts."""
    starts: bool = True
    """Instances and the GPUs of the learner are started, which takes time and is charged. Else both stay everywhere."""
    knows_batch: bool = True
    """Its forecast has responses wait for room in a batch and in the KV cache."""
    paces: bool = True
    """Its learner decides on what has come when it begins and lets go, not on the forecast alone."""
    may_hold: bool = False
    """It may hold GPUs with both models on them for whole steps, where starts cost more."""
    restarts_receiver: bool = False
    """A receiver's contexts are computed again, as with an engine that keeps nothing between requests."""
    pause_seconds: float = 0.0
    """What a cut costs a receiver."""
    tick_seconds: float = 0.25
    warms: bool = True
    """Instances are started while the learner still works, where there are GPUs for both."""
    overlaps_preparation: bool = False
    """Complete groups are prepared while others decode, on GPUs that are free."""
    overlaps_learning: bool = False
    """Their gradients are accumulated as well."""


ROOFLINE_BATCH = 64
"""Sequences that the baselines gather on an instance: few enough not to slow it down much."""


def _actor_ratio(scenario: Scenario, profile: InstanceProfile, samples: int, price: float) -> Rule:
    return ActorRatio(0.95, scenario.max_batch)


def _global_ratio(scenario: Scenario, profile: InstanceProfile, samples: int, price: float) -> Rule:
    return GlobalRatio(0.9, ROOFLINE_BATCH, profile.kv_tokens, samples)


def _repack(scenario: Scenario, profile: InstanceProfile, samples: int, price: float) -> Rule:
    return Repack(ROOFLINE_BATCH, profile.kv_tokens)


def _saving(scenario: Scenario, profile: InstanceProfile, samples: int, price: float) -> Rule:
    return Saving(
        profile.latency,
        scenario.max_batch,
        profile.kv_tokens,
        longest=scenario.lengths.longest,
        time_price=price,
        pause_seconds=PAUSE_SECONDS,
        restarts_receiver=False,
        period=0.5,
        hysteresis=0.25,
    )


PAUSE_SECONDS = 0.3
"""What a chosen cut costs a receiver of ours besides the prefill: closing the stream, the flush, a new request."""

POLICIES = {
    settings.name: settings
    for settings in (
        PolicySettings(
            "static",
            "verl: every GPU generates an even part of the prompts and is held for the whole step",
            planning="even",
            lengths="ignored",
            holds_everything=True,
            starts=False,
            warms=False,
        ),
        PolicySettings(
            "rlhfuse",
            "RLHFuse's inter-stage fusion: at τ = 0.9 of all samples the tail is gathered, and freed instances prepare."
            " Freed instances are not charged, which the original cannot do",
            planning="even",
            lengths="ignored",
            rule=_global_ratio,
            overlaps_preparation=True,
        ),
        PolicySettings(
            "rlhfuse-resident",
            "the same with both models on every GPU all the time, as the original has it: nothing is started, and what"
            " is freed is still not charged",
            planning="even",
            lengths="ignored",
            rule=_global_ratio,
            starts=False,
            overlaps_preparation=True,
        ),
        PolicySettings(
            "paper",
            "RLHFless as published: moving averages, ranked shares, the sweet spot of actors, cut and migrate at"
            " τ = 0.95 of an actor, pre-warming",
            planning="ranked",
            lengths="learnt",
            rule=_actor_ratio,
        ),
        PolicySettings(
            "laminar",
            "Laminar's repack every 5 s in a synchronous step; emptied instances are released",
            planning="even",
            lengths="ignored",
            rule=_repack,
        ),
        PolicySettings(
            "oracle",
            "ours with every length known beforehand",
            planning="optimal",
            lengths="learnt",
            told=frozenset(("division", "migration", "arrivals")),
            rule=_saving,
            pause_seconds=PAUSE_SECONDS,
            may_hold=True,
            overlaps_preparation=True,
            overlaps_learning=True,
        ),
        PolicySettings(
            "rlhfless",
            "ours: learnt lengths, the optimal plan, migration where it saves, overlap",
            planning="optimal",
            lengths="learnt",
            rule=_saving,
            pause_seconds=PAUSE_SECONDS,
            may_hold=True,
            overlaps_preparation=True,
            overlaps_learning=True,
        ),
    )
}
