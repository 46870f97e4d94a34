"""Preparation and learning on instances of their own, as the live loop has them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlhfless_operator.planner.latency.roofline import HOST_UTILISATION
from rlhfless_operator.planner.moves.rules import WaitingLearner
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.step.chunks import CHUNKS_PER_STEP, before_last_chunk
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.holding import StagesHolding, Staying
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.planner.step.overlap import Floats, TrainerPlan, TrainerRun, free_gpus, run_trainer
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.simulator.following import follow_apart, follow_on_slots, prepare_in_chunks
from rlhfless_operator.simulator.scenarios import Scenario

STATE_BYTES = 16
"""Bytes of a trained parameter on the learner's GPUs: weights, gradients and Adam's two moments in float32."""
_SAVED_BYTES = 12
"""Those of them that a learner saves before it is let go or sleeps, and loads when it starts or wakes: all but the
gradients."""
_STATE_RATE = 2e9
"""Bytes per second of a GPU's state, either way, as in rehearsals."""
_MOST_PREPARERS = 64


@dataclass(frozen=True)
class OwnStages:
    """The instances of preparation and learning of a job, and what they take.

    Args:
        learner_gpus: GPUs of the learner.
        publishes_beside: whether publishing holds up no step. The loop writes the weights to the store first.
        follows: whether the learner learns from groups while others are generated.
    """

    scenario: Scenario
    learner_gpus: int
    publishes_beside: bool = False
    follows: bool = False

    @property
    def _after(self) -> float:
        """Seconds from the last gradient until the new weights are in the store."""
        scenario = self.scenario
        if self.publishes_beside:
            return scenario.update_seconds
        return scenario.update_seconds - scenario.publishing_seconds + scenario.store_seconds(self.learner_gpus)

    @property
    def _state_seconds(self) -> float:
        """Seconds in which the learner saves its state before it is let go, and in which a fresh one loads it. One that
        sleeps has it in the host's memory."""
        if self.scenario.sleeps:
            return 0.0
        return state_parameters(self.scenario) * _SAVED_BYTES / (self.learner_gpus * _STATE_RATE)

    @property
    def move_seconds(self) -> float:
        """Seconds in which a learner that sleeps copies its state to the host's memory, or back; 0 if it never does."""
        if not self.scenario.sleeps:
            return 0.0
        rate = self.scenario.gpu.host_bandwidth * HOST_UTILISATION
        return state_parameters(self.scenario) * _SAVED_BYTES / (self.learner_gpus * rate)

    @property
    def learner_start_seconds(self) -> float:
        """Seconds until the learner is there: with its state if it slept, else without it."""
        scenario = self.scenario
        return scenario.startup_seconds + self.move_seconds if scenario.sleeps else scenario.trainer_start_seconds

    @property
    def most_instances(self) -> int:
        """Most generation instances of a plan. Whole pods of two stages are there at a time, so that starts are
        hidden."""
        scenario = self.scenario
        if scenario.sleeps:
            return scenario.instances
        return max(1, (scenario.gpus - self.learner_gpus) // scenario.gpus_per_instance - 1)

    @property
    def shared(self) -> SharedGpus | None:
        """GPUs on which the stages take turns; None where each has its own."""
        scenario = self.scenario
        each = scenario.gpus_per_instance
        gpus = SharedGpus(scenario.gpus, {"generation": each, "preparation": each, "learning": 1})
        return gpus if scenario.sleeps else None

    def waiting_learner(self, tokens: float, preparers: int, earliest: float) -> WaitingLearner | None:
        """Return the learner that waits for GPUs of actors; None if it has its own, or waits for all groups.

        Args:
            tokens: of all samples, as far as they are foreseen.
            earliest: moment at which the plan has it begin.
        """
        if self.shared is None or not self.follows:
            return None
        learning = self.scenario.learning_gpu_seconds(tokens) / self.learner_gpus
        actors = self.shared.actors_beside({"preparation": preparers, "learning": self.learner_gpus})
        return WaitingLearner(actors, before_last_chunk(learning) + self.learner_start_seconds, earliest)

    def late_seconds(self, learnt_beyond: float) -> float:
        """Return the seconds by which new actors of whole pods are late. A step is planned when the one before is
        prepared, so nothing hides more of a start.

        Args:
            learnt_beyond: seconds for which the step before was learnt after generation.
        """
        return 0.0 if self.scenario.sleeps else max(0.0, self.scenario.startup_seconds - learnt_beyond)

    def training(self, stayed: tuple[int, int] | None = None, learnt_beyond: float = math.inf) -> Training:
        """Return what the plan of a step knows of both stages: what earlier steps would have measured.

        Args:
            stayed: generation and preparation instances that stayed in the step before; None before the first one.
            learnt_beyond: see `late_seconds`.
        """
        scenario = self.scenario
        most = min(_MOST_PREPARERS, scenario.instances)
        start, state = self.learner_start_seconds, self._state_seconds
        # A wake that nothing hides delays the step; a start that the forecast hides is charged alone.
        hidden = 0.0 if scenario.sleeps else start
        learner = LearnerOption(
            self.learner_gpus,
            scenario.learning_gpu_seconds(1.0) / self.learner_gpus,
            self._after + start - hidden,
            hidden + state + self.move_seconds,
        )
        return Training(
            gpus=scenario.gpus,
            token_gpu_seconds=scenario.preparation_gpu_seconds(1.0) / scenario.gpus_per_instance,
            start_seconds=0.0,
            update_seconds=0.0,
            preparation_price=float(scenario.gpus_per_instance),
            preparers=tuple(2**power for power in range(most.bit_length())),
            preparer_start_seconds=scenario.preparer_start_seconds if scenario.sleeps else 0.0,
            preparer_idle_seconds=scenario.preparer_start_seconds,
            learners=(learner,),
            follows=self.follows,
            holding=None if stayed is None else self._holding(*stayed, self.late_seconds(learnt_beyond)),
            shared=self.shared,
        )

    def _holding(self, actors: int, preparers: int, late: float) -> StagesHolding | None:
        """Return the costs of keeping all instances, with so many there; None if they sleep, and cost nothing then."""
        scenario, each = self.scenario, float(self.scenario.gpus_per_instance)
        if scenario.sleeps:
            return None
        switch = scenario.trainer_start_seconds + 2 * self._state_seconds
        return StagesHolding(
            Staying(actors, scenario.startup_seconds, each),
            Staying(preparers, scenario.preparer_start_seconds, each),
            Staying(self.learner_gpus if actors else 0, switch),
            late,
        )

    def stay(self, actors: int, preparers: int, stayed: tuple[int, int]) -> tuple[int, float]:
        """Return the GPUs of instances that all stay, and the GPU-seconds of starting those that did not."""
        scenario, (before, prepared) = self.scenario, stayed
        starts = max(0, actors - before) * scenario.startup_seconds
        starts += max(0, preparers - prepared) * scenario.preparer_start_seconds
        starts *= scenario.gpus_per_instance
        starts += 0.0 if before else self.learner_gpus * (scenario.trainer_start_seconds + self._state_seconds)
        return (actors + preparers) * scenario.gpus_per_instance + self.learner_gpus, starts

    def run(
        self,
        completions: Floats,
        preparation: Floats,
        learning: Floats,
        ends: Sequence[float],
        preparers: int,
        *,
        is_there: bool,
        stays: bool = False,
    ) -> TrainerRun:
        """Prepare the groups, then learn from all of them.

        Both begin by the forecast, which is corrected as the rollout goes on: preparation so that it works without a
        pause, the learner when the last group is prepared. A learner that would wait for longer than a switch costs is
        let go.

        Args:
            completions: [groups] moments at which each is generated.
            preparation: [groups] GPU-seconds of each.
            learning: [groups] GPU-seconds of each.
            ends: moments at which the generation instances have ended.
            preparers: instances that prepare.
            is_there: whether the learner was there in the step before.
            stays: whether the instances of all stages stay for the whole step.
        """
        scenario, each = self.scenario, self.scenario.gpus_per_instance
        free = free_gpus(ends, scenario.gpus, each)
        start, total, last = (
            0.0 if stays else scenario.preparer_start_seconds,
            float(preparation.sum()),
            float(completions.max()),
        )
        gpus = preparers * each
        begin = max(0.0, last - total / gpus - start)
        prepared = run_trainer(
            completions, preparation, free, TrainerPlan(gpus, begin), start_seconds=start, update_seconds=0.0
        )
        # The last chunk is prepared after the last group is there.
        complete = max(prepared.end, last + total / gpus / CHUNKS_PER_STEP)
        # The learner's GPUs come together. While preparation has GPUs, they are others.
        beside = gpus + self.learner_gpus
        together = float(free[beside - 1]) if beside <= len(free) else math.inf
        together = min(together, max(complete, float(free[self.learner_gpus - 1])))
        start, state = self.learner_start_seconds, self._state_seconds
        after = float(learning.sum()) / self.learner_gpus + self._after
        if stays or (is_there and not scenario.sleeps and together == -math.inf and complete <= start + 2 * state):
            asked, saved, end = 0.0, 0.0, complete + after
        else:
            # A forecast hides the start of a whole pod, and the load of its state.
            asked, saved = max(together, complete if scenario.sleeps else complete - start - state), state
            end = max(complete, asked + start + state) + after
        held = self.learner_gpus * (end - asked + saved + self.move_seconds) + gpus * (complete - prepared.end)
        moments = (*prepared.asked, *([asked] * self.learner_gpus))
        return TrainerRun(end, self.learner_gpus, held + prepared.gpu_seconds, moments)

    def follow(
        self,
        completions: Floats,
        preparation: Floats,
        learning: Floats,
        ends: Sequence[float],
        preparers: int,
        *,
        expected: Floats | None,
        time_price: float,
        stays: bool = False,
    ) -> TrainerRun:
        """Prepare the groups and learn from each once it is prepared; see `run`.

        Args:
            expected: [groups] moments at which they were expected to be prepared; None in the first step, in which
                nothing is known of learning.
            time_price: GPU-seconds that a second of the step is worth.
        """
        scenario, each, gpus = self.scenario, self.scenario.gpus_per_instance, self.learner_gpus
        free, work, last = free_gpus(ends, scenario.gpus, each), learning / gpus, float(completions.max())
        # Preparation begins so early that the learner does not wait for it.
        wake = 0.0 if stays else scenario.preparer_start_seconds
        begin = max(0.0, last - float(preparation.sum()) / (preparers * each) - wake - float(work.sum()))
        if scenario.sleeps:
            begin = max(begin, float(free[min(preparers * each, scenario.gpus) - 1]))
        prepared = prepare_in_chunks(completions, preparation / each, work, preparers, begin=begin, wake_seconds=wake)
        complete, beside = prepared.pieces[-1].ready, preparers * each + gpus
        together = float(free[beside - 1]) if beside <= len(free) else math.inf
        together = min(together, max(complete, float(free[gpus - 1])))
        start, state = self.learner_start_seconds, self._state_seconds
        latest = complete if expected is None else float(expected.max())
        pace = LearnerPace(start + state, (start + 2 * state) * (1 + time_price / gpus), latest)
        if scenario.sleeps:
            run = follow_on_slots(prepared.pieces, expected, work, pace, gpus, together)
            held = run.gpu_seconds + gpus * (self._after + self.move_seconds)
            run = replace(run, end=run.end + self._after, gpu_seconds=held)
        else:
            assert expected is not None, "whole pods wait for the whole batch in the first step"
            kept = stays or (together == -math.inf and complete <= start + 2 * state)
            usable = None if kept else np.full(gpus, together)
            run = follow_apart(prepared.pieces, expected, work, pace, gpus, usable, self._after)
            if not kept:
                run = replace(run, gpu_seconds=run.gpu_seconds + gpus * state)
        return replace(run, gpu_seconds=run.gpu_seconds + prepared.held_seconds * each)


def learner_sizes(scenario: Scenario) -> list[int]:
    """Return the numbers of GPUs on which the learner's state fits: powers of two, and all GPUs."""
    least = math.ceil(STATE_BYTES * state_parameters(scenario) / (0.8 * scenario.gpu.memory))
    sizes = {2**power for power in range(scenario.gpus.bit_length())} | {scenario.gpus}
    return sorted(size for size in sizes if least <= size <= scenario.gpus) or [scenario.gpus]


def state_parameters(scenario: Scenario) -> float:
    """Return the parameters that are trained: PPO's critic is as large as the policy."""
    return scenario.model.parameters * (2 if scenario.algorithm == "ppo" else 1)


def best_of(rows: Sequence[tuple[float, float]], cost_weight: float) -> int:
    """Return the place of the (seconds, GPU-seconds) with the least (1 − λ) · time + λ · cost, each over its least."""
    seconds, cost = np.array(rows).T
    return int(np.argmin((1 - cost_weight) * seconds / seconds.min() + cost_weight * cost / cost.min()))
