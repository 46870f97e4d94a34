"""Lower bounds on the time in which a system with a split of the GPUs takes some steps.

docs/research/asynchronous.md has the proof.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.step.bounds import alone_seconds, lower_bound
from rlhfless_operator.simulator.asynchronous.systems import Split
from rlhfless_operator.simulator.asynchronous.work import Group
from rlhfless_operator.simulator.scenarios import Scenario

Floats = NDArray[np.float64]


def decode_instance_seconds(scenario: Scenario, groups: Sequence[Group], sequences: int) -> float:
    """Return the least instance-seconds in which a system generates these groups, for any division and any moves.

    Args:
        sequences: most sequences that an instance decodes at a time.
    """
    lengths = np.array([length for group in groups for length in group.lengths], dtype=np.float64)
    contexts = np.array([group.prompt_tokens for group in groups for _ in group.lengths], dtype=np.float64)
    latency = scenario.profile().latency
    prompts = float(sum(group.prompt_tokens for group in groups))
    # With this much time, no pass has to serve one sequence alone.
    for_ever = 1e6 * alone_seconds(lengths, contexts, latency).sum()
    return lower_bound(lengths, contexts, latency, for_ever, prefill_tokens=prompts, max_batch=sequences)


def least_seconds(
    scenario: Scenario,
    split: Split,
    steps: Sequence[Sequence[Group]],
    most_stale: int,
    *,
    regroups: bool = False,
    publishes_beside: bool = False,
) -> float:
    """Return the least seconds from the beginning to the last version in which a system takes these steps.

    Args:
        steps: the groups of each step.
        most_stale: greatest staleness of a group, by its oldest token.
        regroups: whether steps may exchange groups.
        publishes_beside: whether the learner goes on while weights are on their way.
    """
    groups = [group for step in steps for group in step]
    tokens = sum(group.tokens for group in groups)
    preparation, learning = scenario.preparation_gpu_seconds(1.0), scenario.learning_gpu_seconds(1.0)
    update = scenario.update_seconds
    on_learner = learning if split.preparers else preparation + learning
    beside = min(scenario.publishing_seconds, update) * (len(steps) - 1) if publishes_beside else 0.0
    least = [
        decode_instance_seconds(scenario, groups, split.sequences) / split.instances,
        tokens * on_learner / split.learner_gpus + update * len(steps) - beside,
        stale_seconds(scenario, split, steps, most_stale, regroups=regroups),
    ]
    if split.preparers:
        least.append(tokens * preparation / (split.preparers * scenario.gpus_per_instance))
    return max(least)


def stale_seconds(
    scenario: Scenario, split: Split, steps: Sequence[Sequence[Group]], most_stale: int, *, regroups: bool = False
) -> float:
    """Return the bound of staleness alone: the one of `least_seconds`'s bounds that more GPUs hardly lower."""
    groups = [group for step in steps for group in step]
    latency = scenario.profile().latency
    longest = np.array([max(group.lengths) for group in groups], dtype=np.float64)
    contexts = np.array([group.prompt_tokens for group in groups], dtype=np.float64)
    tokens = np.array([group.tokens for group in groups], dtype=np.float64)
    learning = tokens * scenario.learning_gpu_seconds(1.0) / split.learner_gpus
    # No group is divided between instances.
    preparer = scenario.gpus_per_instance if split.preparers else split.learner_gpus
    preparation = tokens * scenario.preparation_gpu_seconds(1.0) / preparer
    least: Floats = alone_seconds(longest, contexts, latency) + preparation + learning
    if regroups:
        # The sum of the steps' greatest is least if groups are sorted.
        least = np.sort(least)[::-1]
    begins = np.cumsum([0, *(len(step) for step in steps)])[:-1]
    greatest = np.maximum.reduceat(least, begins)
    return float(greatest.sum() + scenario.update_seconds * len(steps)) / min(most_stale + 1, len(steps))


def whole_cluster_seconds(
    scenario: Scenario, steps: Sequence[Sequence[Group]], most_stale: int, *, regroups: bool = False
) -> float:
    """Return the bound for any system with all GPUs of the scenario, for any split at any time."""
    groups = [group for step in steps for group in step]
    everything = Split(scenario.instances, scenario.gpus, scenario.max_batch)
    tokens = sum(group.tokens for group in groups)
    work = decode_instance_seconds(scenario, groups, scenario.max_batch) * scenario.gpus_per_instance
    work += tokens * (scenario.preparation_gpu_seconds(1.0) + scenario.learning_gpu_seconds(1.0))
    return max(work / scenario.gpus, stale_seconds(scenario, everything, steps, most_stale, regroups=regroups))
