"""Ours in a scenario: rollouts that overlap on the instances, and steps that take the first complete groups."""

import math
from collections.abc import Iterator, Sequence

from rlhfless_operator.planner.groups.group_buffer import piece_size
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.step.bounds import least_held, most_at_once
from rlhfless_operator.simulator.asynchronous.job import StageSeconds, Use, Work
from rlhfless_operator.simulator.asynchronous.live_job import LiveJob, Swaps
from rlhfless_operator.simulator.asynchronous.live_plans import LivePlans
from rlhfless_operator.simulator.asynchronous.systems import Rollouts, Split
from rlhfless_operator.simulator.asynchronous.work import Group, Outcome
from rlhfless_operator.simulator.scenarios import PLATFORMS, Scenario


def run_rollouts(
    scenario: Scenario, system: Rollouts, split: Split, batches: Iterator[list[Group]], steps: int
) -> Outcome:
    """Run until the learner has taken `steps` steps.

    Args:
        batches: the groups of each rollout, without end.
    """
    history = History()
    learning, preparation = scenario.learning_gpu_seconds(1.0), scenario.preparation_gpu_seconds(1.0)
    profile = scenario.profile()
    seconds = StageSeconds(
        weight_load=profile.weight_load_seconds,
        preparation_token=preparation / scenario.gpus_per_instance,
        learning_token=(learning + (0.0 if split.preparers else preparation)) / split.learner_gpus,
        update=scenario.update_seconds - scenario.publishing_seconds + copy_seconds(scenario, split.learner_gpus),
        publishing=scenario.store_seconds(split.learner_gpus),
        prepares=split.preparers > 0,
    )
    # A critic of the learner's values whole batches.
    in_pieces = scenario.algorithm != "ppo"
    plans = LivePlans(scenario, system, split, history, swap_seconds(scenario), in_pieces=in_pieces)
    job = LiveJob(
        system,
        scenario.prompts_per_step,
        seconds,
        plans,
        history,
        batches,
        profile=profile,
        swaps=Swaps(profile.weight_load_seconds, swap_seconds(scenario), system.recomputes),
        least=piece_size(scenario.prompts_per_step) if in_pieces else 0,
    )
    work = job.until(steps)
    return _outcome(scenario, split, profile, work)


_SWAP_RATE = 4.2e9
"""Bytes of weights per second and GPU that an actor swaps for others in its host's memory. Measured: 126 MB in 30 ms,
`benchmarks/weights/results/weight_swap.json`."""


_COPY_RATE = 5.6e9
"""Bytes of weights per second and GPU that the learner copies to its host's memory. Measured: 126 MB in 23 ms,
`benchmarks/weights/results/publishing.json`."""


def copy_seconds(scenario: Scenario, learner_gpus: int) -> float:
    """Return the seconds for which publishing holds the learner up: the rest of it goes on beside the next step."""
    return scenario.model.weight_bytes / learner_gpus / _COPY_RATE


def swap_seconds(scenario: Scenario) -> float:
    """Return the seconds for which an actor stands still for newer weights, besides computing contexts anew."""
    return scenario.model.weight_bytes / scenario.gpus_per_instance / _SWAP_RATE


def _outcome(scenario: Scenario, split: Split, profile: InstanceProfile, work: Work) -> Outcome:
    """Return the outcome up to the end of the last step. Instances that generate or prepare are kept without work, or
    let go and started in time, as costs less. They are no slots that sleep. The learner stays: another one would repeat
    steps. The first start of each instance is left out, as those of static actors are."""
    now, start = work.steps[-1].end, max(profile.startup_seconds, PLATFORMS["pods"].startup_seconds)

    def held(uses: Sequence[Use]) -> float:
        until_now = [(begin, min(end, now)) for begin, end in uses if begin < now]
        charged = least_held(until_now, start_seconds=start, drain_seconds=0.0)
        return charged - start * most_at_once(until_now)

    def busy(uses: Sequence[Use]) -> float:
        return math.fsum(min(end, now) - begin for begin, end in uses if begin < now)

    gpus, learner = scenario.gpus_per_instance, split.learner_gpus
    return Outcome(
        tuple(work.steps),
        generation_busy=busy(work.decoding) * gpus,
        generation_held=held(work.generation) * gpus,
        learner_busy=busy(work.learning) * learner,
        learner_held=(now - work.steps_learnt[0][0]) * learner,
        preparer_held=held(work.preparation) * gpus,
        left=tuple(work.left),
        dropped=work.dropped,
    )
