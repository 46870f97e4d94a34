"""The asynchronous systems that are compared, as data: others, with a fixed split of the GPUs, and ours.

Step v makes version v of the weights. A step learns from `prompts_per_step` groups, and a group's staleness is that of
its oldest token (docs/asynchronous.md).
"""

from dataclasses import dataclass
from typing import Literal

from rlhfless_operator.planner.groups.group_buffer import TooStale


@dataclass(frozen=True)
class Streaming:
    """A system with a fixed split of the GPUs. Its groups reach the learner as they become complete."""

    name: str
    stands_for: str
    new_weights: Literal["switch", "drain", "finish"]
    """Reaction to a new version. `switch`: all instances stop, load it, and go on.
    `drain`: no group begins until all instances have ended their responses; then all load it. `finish`: each instance
    loads it once its own responses have ended. With `switch` and `drain` the learner waits until all have it."""
    ahead: float | None
    """Number of groups that may begin at version v: (v + 1 + ahead) batches. None: groups begin while less than a batch
    waits for the learner."""
    pieces: int = 1
    """Number of parts of a batch that the learner takes one by one, each as soon as its groups are there."""
    whole_batches: bool = False
    """Whether a batch begins only when all groups of the one before have ended."""
    oldest_first: bool = False
    """Whether the learner prefers groups of older versions to those that were complete earlier."""
    recomputes: bool = True
    """Whether instances compute contexts anew for new weights with `switch`."""
    repack_seconds: float | None = None
    """Seconds after which responses of one version are gathered on fewer instances again; None for never."""


@dataclass(frozen=True)
class Rollouts:
    """Ours: rollouts that overlap, as far as staleness allows, and groups that go on their own."""

    name: str
    stands_for: str
    max_staleness: int
    too_stale: TooStale = "wait"
    """Rule for a group that would become too stale."""
    new_weights: Literal["finish", "switch"] = "finish"
    """Weights of a response under way: those that began it, or newer ones as soon as they are there."""
    recomputes: bool = True
    """Whether contexts are computed anew for newer weights (`kvCache: recompute`)."""
    preparers: int = 64
    """Most instances that only prepare. With 0 the learner's GPUs prepare before they learn."""


System = Streaming | Rollouts

SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        Streaming(
            "one-step-off",
            "verl's one_step_off_policy: a batch is generated while the one before is learnt from, then all load",
            new_weights="drain",
            ahead=1,
            whole_batches=True,
        ),
        Streaming(
            "verl-async",
            "verl's fully_async with staleness_threshold 0.5, trigger_parameter_sync_step 4 and partial_rollout",
            new_weights="switch",
            ahead=0.5,
            pieces=4,
        ),
        Streaming(
            "verl-async-no-partial",
            "the same without partial_rollout: responses that are under way end before weights are loaded",
            new_weights="drain",
            ahead=0.5,
            pieces=4,
        ),
        Streaming(
            "areal-1",
            "AReaL with max_head_offpolicyness 1: admission by staleness, interruptible generation, older groups first",
            new_weights="switch",
            ahead=1,
            oldest_first=True,
        ),
        Streaming(
            "areal-4",
            "the same with 4",
            new_weights="switch",
            ahead=4,
            oldest_first=True,
        ),
        Streaming(
            "skyrl-4",
            "SkyRL's fully_async with max_staleness_steps 4: admission as AReaL's, and kept keys and values",
            new_weights="switch",
            ahead=4,
            recomputes=False,
        ),
        Streaming(
            "laminar",
            "Laminar: a response keeps its version, instances load from relays beside the learner, repack every 5 s",
            new_weights="finish",
            ahead=None,
            repack_seconds=5.0,
        ),
        Rollouts("rlhfless-async-1", "ours with maxStaleness 1", max_staleness=1),
        Rollouts("rlhfless-async-2", "ours with maxStaleness 2", max_staleness=2),
        Rollouts(
            "rlhfless-async-1-switch",
            "ours with maxStaleness 1, newWeights switch",
            max_staleness=1,
            new_weights="switch",
        ),
        Rollouts(
            "rlhfless-async-1-switch-downweight",
            "the same with tooStale downweight",
            max_staleness=1,
            too_stale="downweight",
            new_weights="switch",
        ),
        Rollouts(
            "rlhfless-async-2-switch-downweight",
            "the same with maxStaleness 2",
            max_staleness=2,
            too_stale="downweight",
            new_weights="switch",
        ),
        Rollouts(
            "rlhfless-async-2-switch-keep-downweight",
            "the same with kvCache keep",
            max_staleness=2,
            too_stale="downweight",
            new_weights="switch",
            recomputes=False,
        ),
        Rollouts(
            "rlhfless-async-4-switch-keep-downweight",
            "the same with maxStaleness 4",
            max_staleness=4,
            too_stale="downweight",
            new_weights="switch",
            recomputes=False,
        ),
        Rollouts(
            "rlhfless-async-2-downweight",
            "ours with maxStaleness 2 and tooStale downweight",
            max_staleness=2,
            too_stale="downweight",
        ),
        Rollouts(
            "rlhfless-async-2-one-preparer",
            "the same with preparation.instances left out: one instance prepares for all rollouts",
            max_staleness=2,
            too_stale="downweight",
            preparers=1,
        ),
    )
}
"""Systems by name."""


@dataclass(frozen=True)
class Split:
    """The GPUs of each stage, and the most sequences of an instance."""

    instances: int
    """Most generation instances."""
    learner_gpus: int
    sequences: int
    """Most sequences that an instance decodes at a time."""
    preparers: int = 0
    """Most instances that only prepare."""
