"""The systems that are compared: how each plans, when it cuts, and which work it overlaps and which GPUs it releases.

Every baseline has prefix caching within an instance, and moves running samples without stopping the receiver. If it
releases instances at all, it does so as soon as they are empty. Its ratio and batch are the best for it on the first
scenario (docs/research/simulation.md). Ours pays a pause of the receiver for each cut, because an instance takes one
request at a time; its engine's prefix cache keeps the receiver's contexts.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.moves.migration import Rule
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving
from rlhfless_operator.simulator.global_ratio import GlobalRatio
from rlhfless_operator.simulator.scenarios import Scenario

PolicyName = Literal[
    "static",
    "rlhfuse",
    "rlhfuse-resident",
    "paper",
    "paper-overlap",
    "laminar",
    "oracle",
    "rlhfless-whole-batch",
    "rlhfless",
]

Ability = Literal["holding", "overlap", "publishing"]
"""Abilities that the live loop has or gets. `holding`: GPUs keep both models for whole steps where that is better.
`overlap`: the learner learns while others decode, on the slots that actors leave or on GPUs of its own, as the live
loop does with `learning.overlap: auto` where the algorithm allows it. `publishing`: new weights reach instances without
the store."""
EVERYTHING = frozenset[Ability](get_args(Ability))
COMPLETE = "+".join(("rlhfless", *get_args(Ability)))
"""Name of ours with all of them."""
IN_THE_LOOP = frozenset[Ability](("overlap",))
"""Abilities that the live loop has by default. One that lands there is added here, and nowhere else."""

Told = Literal["division", "migration", "arrivals", "long", "short"]
"""Knowledge that a policy may have beforehand: the lengths for its division, those for its moves, the moments at which
groups are complete, the lengths of the long responses (`foresight.LONG`), and those of all others."""

RuleMaker = Callable[[Scenario, InstanceProfile, int, float], Rule]
"""(scenario, profile, samples, price of a second in instance-seconds) → a step's rule."""


@dataclass(frozen=True)
class PolicySettings:
    """One system."""

    name: str
    stands_for: str
    planning: Literal["even", "ranked", "optimal"]
    """`even`: an even split of unsorted prompts. `ranked`: equal numbers of ranked prompts on the best number of
    actors. `optimal`: our planner."""
    lengths: Literal["ignored", "learnt"]
    told: frozenset[Told] = frozenset()
    """Knowledge that it has beforehand, instead of learning it."""
    rule: RuleMaker | None = None
    holds_everything: bool = False
    """Whether all GPUs are held for the whole step."""
    generating_share: float = 1.0
    """Part of the instances that generate, if everything is held. The GPUs of the others only prepare and learn."""
    drafts: bool = True
    """Whether it drafts in a scenario with drafts."""
    starts: bool = True
    """Whether instances and the learner are started, which takes time and is charged. Else both stay on all GPUs."""
    knows_batch: bool = True
    """Whether its forecast lets responses wait for room in a batch and in the KV cache."""
    paces: bool = True
    """Whether its learner begins and lets go by the groups that have come, and not by the forecast alone."""
    lets_go: bool = False
    """Whether it lets an instance go while environments work on all of its responses."""
    may_hold: bool = False
    """Whether it may hold GPUs with both models for whole steps if starts cost more."""
    restarts_receiver: bool = False
    """Whether a receiver's contexts are computed again, as by an engine that keeps nothing between requests."""
    pause_seconds: float = 0.0
    """Seconds that a cut costs a receiver."""
    tick_seconds: float = 0.25
    warms: bool = True
    """Whether instances are started while the learner still works, if there are GPUs for both."""
    overlaps_preparation: bool = False
    """Whether complete groups are prepared while others decode, on free GPUs."""
    overlaps_learning: bool = False
    """Whether their gradients are accumulated as well."""
    learns_from: float | None = None
    """Part of the groups that is complete when its learner begins; None to follow a forecast."""
    own_stages: bool = False
    """Whether preparation and learning have instances of their own, as in the live loop: a learner of a fixed size
    begins after preparation, or follows it if it overlaps. Else they use all free GPUs."""
    publishes_beside: bool = True
    """Whether new weights are broadcast, which holds up the step for `update_seconds` in all. The live loop writes them
    to the store."""


ROOFLINE_BATCH = 64
"""Number of sequences that the baselines gather on an instance: few enough not to slow it down much."""


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
        period=0.5,
        hysteresis=0.25,
    )


PAUSE_SECONDS = 0.3
"""Seconds that a move costs a receiver of ours besides the prefill. In the live loop it goes on, and the moved samples
wait."""

_OURS: dict[str, Any] = {
    "planning": "optimal",
    "lengths": "learnt",
    "rule": _saving,
    "pause_seconds": PAUSE_SECONDS,
    "lets_go": True,
}


def _ours(abilities: Collection[Ability], name: str) -> PolicySettings:
    """Return ours with these abilities."""
    overlaps, holds = "overlap" in abilities, "holding" in abilities
    return PolicySettings(
        name,
        "ours: learnt lengths, the optimal plan, migration where it saves"
        + "".join(f", {each}" for each in sorted(abilities)),
        **_OURS,
        own_stages=not holds,
        publishes_beside="publishing" in abilities,
        may_hold=holds,
        overlaps_preparation=overlaps,
        overlaps_learning=overlaps,
    )


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
            "paper-overlap",
            "the same with a learner that begins on freed GPUs when half of the groups are complete",
            planning="ranked",
            lengths="learnt",
            rule=_actor_ratio,
            overlaps_preparation=True,
            overlaps_learning=True,
            learns_from=0.5,
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
            "ours with every ability that the loop gets, and with every length known beforehand",
            **_OURS,
            told=frozenset(("division", "migration", "arrivals")),
            may_hold=True,
            overlaps_preparation=True,
            overlaps_learning=True,
        ),
        _ours((), "rlhfless-whole-batch"),
        _ours(IN_THE_LOOP, "rlhfless"),
    )
}


def find_policy(name: str) -> PolicySettings:
    """Return the policy with this name. `rlhfless+holding` is ours with an ability that the loop does not have yet.

    Raises:
        ValueError: naming all policies and abilities.
    """
    if name in POLICIES:
        return POLICIES[name]
    ours, *added = name.split("+")
    if ours != "rlhfless" or not added or not set(added) <= EVERYTHING:
        raise ValueError(
            f"policy is {name!r}: choose one of {', '.join(POLICIES)}, or rlhfless with + and"
            f" {', '.join(sorted(EVERYTHING - IN_THE_LOOP))}"
        )
    return _ours(IN_THE_LOOP | {each for each in EVERYTHING if each in added}, name)
