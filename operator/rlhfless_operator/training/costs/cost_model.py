"""The lengths, speeds and stage times that a job has learnt, and the plans that rest on them."""

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from rlhfless_functions.api import EngineRoom, LearnResult, SampleTask
from rlhfless_operator.job.actor_range import ActorRange, preparer_range
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.acting import ActingPredictor
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.calibration import Calibration
from rlhfless_operator.planner.latency.drafting import LONGEST_DRAFT, DraftedLatency, Drafts
from rlhfless_operator.planner.latency.linear import Latency, LinearLatency
from rlhfless_operator.planner.lengths import LengthPredictor
from rlhfless_operator.planner.moves.migration import Migration
from rlhfless_operator.planner.pools.contention import ALONE, Contention
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus
from rlhfless_operator.planner.step.bounds import lower_bound
from rlhfless_operator.planner.step.generation import ExpectedGroup, ExpectedSamples, plan_generation
from rlhfless_operator.planner.step.holding import StagesHolding
from rlhfless_operator.planner.step.learner_scaling import LearnerOption, Measured, to_judge_by
from rlhfless_operator.planner.step.pace import LearnerPace
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.costs.generation_plan import (
    SWITCH,
    WEIGHTS,
    GenerationPlan,
    asynchrony_of,
    in_tasks,
    limits_of,
    setting_of,
    training_of,
)
from rlhfless_operator.training.costs.live_migration import UNKNOWN_PAUSE_SECONDS, open_migration, waiting_learner
from rlhfless_operator.training.costs.observations import note_preparation, observe
from rlhfless_operator.training.costs.prefix_choice import MEASURED, UNABLE
from rlhfless_operator.training.costs.prefix_sharing import FOLDER, STORE, PrefixSharing, TokenSeconds
from rlhfless_operator.training.costs.state_times import StateTimes
from rlhfless_operator.training.instances.away import acting_by_token

_LEAST_SWITCH_SECONDS = 1.0
"""Least seconds for which a learner is let go: it is seen to wait, and looks for groups, a few times a second."""

_COVERAGE, _ACCEPTANCE = "drafts/coverage", "drafts/acceptance"
"""Names in the history of the share of look-ups that found a draft, and of the share of draft tokens that were
right."""
_DRAFT_STEPS = 4
"""Number of newest steps that count for drafts: they rise and fall from one pass over the data to the next."""
_FIRST = "learning/first"
"""Name in the history of the times of steps that learners took right after loading."""
_SAVE = "learning/save"
"""Name in the history of the times in which learners saved their state."""
_CHECKPOINT_SIZE = 6.0
"""Bytes of a checkpoint for each byte of published weights: float32 weights and two moments, and bfloat16."""

_UNKNOWN_DEVICE = LinearLatency(
    step_seconds=0.002,
    sequence_seconds=0.00002,
    context_seconds=1e-8,
    prefill_token_seconds=0.000005,
    draft_seconds=0.00002,
)
"""Starting point of calibration on an unknown device: a small model on a CPU."""


class CostModel:
    """The costs of one job.

    They are part of the checkpoint: a resumed job plans as well as one that was never interrupted.

    Args:
        spec: the job's.
        actors: how many generation instances a step may use.
        contention: called before each plan; returns the GPUs that other jobs leave.
        latency: of the instances, as far as it is known before their first work.
        shared: GPUs on which the stages take turns; None if they can all have theirs at once.
        preparers: how many preparation instances a step may use; by default those of a job without GPUs.
    """

    def __init__(
        self,
        spec: RLHFJobSpec,
        actors: ActorRange,
        contention: Callable[[], Contention] = lambda: ALONE,
        *,
        latency: LinearLatency | None = None,
        shared: SharedGpus | None = None,
        preparers: ActorRange | None = None,
    ) -> None:
        self._shared, self._preparers = shared, preparers or preparer_range(spec, actors, {})
        self._spec = spec
        self._actors = actors
        self._contention = contention
        longest = spec.sampling.max_response_tokens
        self.predictor = LengthPredictor(default_tokens=longest / 2, longest=longest)
        self.calibration = Calibration(latency or _UNKNOWN_DEVICE)
        self.history = History()
        self.acting = ActingPredictor(lambda: acting_by_token(self.history))
        self.room: EngineRoom | None = None
        """Least room that the instances of the newest step have reported."""
        self._split_actors: int | None = None
        """Number of actors of the newest split of an asynchronous job."""
        self._state_times = StateTimes()

    # --- planning ---

    @property
    def latency(self) -> Latency:
        """Latency of the instances, with the drafts of the newest steps."""
        plain, room = self.calibration.latency, self.room
        coverage, acceptance = (self.history.recent(name)[-_DRAFT_STEPS:] for name in (_COVERAGE, _ACCEPTANCE))
        if room is None or not room.longest_draft or not coverage or not acceptance:
            return plain
        return DraftedLatency(plain, Drafts(fmean(coverage), fmean(acceptance), min(room.longest_draft, LONGEST_DRAFT)))

    @property
    def engine_factor(self) -> float | None:
        """Ratio of the engine's seconds to those of its GPU's table; None without a table, and in a rehearsal of it."""
        known = self._spec.rehearsal is None and self.calibration.prior != _UNKNOWN_DEVICE
        return self.calibration.prior_factor if known else None

    def plan(
        self,
        prompts: Sequence[int],
        samples_per_prompt: int,
        prompt_tokens: Sequence[int],
        *,
        known: bool,
        follows: bool = False,
        learners: Sequence[LearnerOption] = (),
        learning_instances: int = 1,
        holding: StagesHolding | None = None,
    ) -> GenerationPlan:
        """Plan a step's generation.

        Args:
            prompt_tokens: of every prompt of their dataset, by row.
            known: whether they are training prompts. For others, rows of another dataset, only the prior is known.
            follows: whether learning may begin before the batch is complete.
            learners: numbers of learning instances to choose from; none if there is no choice.
            learning_instances: number of them if there is no choice.
            holding: costs of keeping all instances for the whole step; None if they can't be kept.
        """
        spec, contention = self._spec, self._contention()
        predict = self.predictor.predict if known else self.predictor.predict_other
        estimates = {prompt: predict(prompt, prompt_tokens[prompt]) for prompt in prompts}
        acting = {each: self.acting.predict(each, estimates[each].mean, known=known) for each in prompts}
        groups = [
            ExpectedGroup(each, prompt_tokens[each], samples_per_prompt, estimates[each], acting[each])
            for each in prompts
        ]
        samples = ExpectedSamples.of(groups, spec.sampling.max_response_tokens)
        limits = limits_of(spec, self._actors, self.room)
        # An evaluation is not generated ahead.
        ahead = asynchrony_of(spec, self.history, self._split_actors, follows=follows) if known else None
        # Stages that work at the same time follow each other in any case.
        follows = follows and ahead is None
        training = training_of(
            *(spec, self.history, learners, self._preparers),
            follows=follows,
            learning_instances=learning_instances,
            holding=holding,
            shared=self._shared,
        )
        setting = setting_of(spec, limits, self.latency, training, self.history, contention, ahead)
        planned = plan_generation(spec.planning.policy, samples, setting)
        if planned.split is not None:
            self._split_actors = planned.split.actors
        return in_tasks(planned, estimates, contention)

    def share_prefixes(
        self,
        tree: Mapping[str, Any],
        shares: Sequence[Sequence[SampleTask]],
        prompt_tokens: Sequence[int],
        *,
        in_store: bool,
    ) -> PrefixSharing:
        """Return the prefixes that actors compute for each other, where sending pays or the job asks for it.

        Args:
            in_store: whether they go through an object store.
        """
        prefill, way = self.calibration.latency.prefill_token_seconds, STORE if in_store else FOLDER
        unknown = way.unknown_share * prefill
        fetch, send = self.history.mean("prefix/token", unknown), self.history.mean("prefix/sent_token", unknown)
        always = self._spec.generation.share_prefixes == "always"
        seconds = TokenSeconds(prefill, send, fetch)
        return PrefixSharing(tree, shares, prompt_tokens, seconds, way.transfer_seconds, always=always)

    def open_migration(self, plan: GenerationPlan) -> Migration:
        """Open the migration that chooses samples to move while a plan is carried out."""
        pause = self.history.mean("pause", UNKNOWN_PAUSE_SECONDS)
        wake = self.history.mean("waking/learning", self.history.mean(startup("learning")))
        learner = waiting_learner(plan.planned, self._shared, wake)
        return open_migration(self._spec, plan, self.latency, pause_seconds=pause, room=self.room, learner=learner)

    def restart_seconds(self, steps: int) -> float:
        """Return the seconds until a fresh learner can work: loading, and so many steps again."""
        return self.history.mean("learning/load") + steps * self.history.mean("learning/train")

    def taking_up_seconds(self, steps: int) -> float:
        """Return the seconds in which a fresh learner loads a checkpoint and takes so many steps again; 0 if nothing is
        known. Before one was loaded, it is as large as one that was saved."""
        load = self.history.mean("learning/load")
        return max(load, self.history.mean(_SAVE)) + steps * self.history.mean("learning/train") if load else 0.0

    def letting_go_seconds(self, steps: int) -> float:
        """Return the seconds that letting a learner go costs besides its end and a start.

        Args:
            steps: how many steps a fresh learner would repeat if the state is not saved.
        """
        return min(self.restart_seconds(steps), self._save_and_load_seconds()) if steps else self.restart_seconds(0)

    def saves_state(self, steps: int) -> bool:
        """Return whether a learner that is let go saves its state, rather than have so many steps repeated."""
        return self._save_and_load_seconds() < self.restart_seconds(steps)

    def _save_and_load_seconds(self) -> float:
        # A checkpoint has the optimizer's moments, the model as given has not; an adapter's is small.
        size = 1.0 if self._spec.model.lora is not None else _CHECKPOINT_SIZE
        save = self.history.mean(_SAVE, size * self.history.mean("learning/load"))
        return save + max(save, self.history.mean("learning/load"))

    def saved(self, seconds: float) -> None:
        """Learn how long it takes to save a learner's state."""
        self.history.add(_SAVE, seconds)

    def taken_up(self, load_seconds: float) -> None:
        """Learn how long it takes to load a learner's state."""
        if load_seconds:
            self.history.add("learning/load", load_seconds)

    def learning_seconds(self, tokens: float) -> float | None:
        """Return the expected seconds of learning from so many tokens, prompts included; None if unknown."""
        token_seconds = self.history.mean("learning/token")
        return tokens * token_seconds + self.history.mean("learning/rest") if token_seconds else None

    def learner_pace(self, steps: int, *, held: bool, time_price: float, last_seconds: float) -> LearnerPace:
        """Return the rule by which a learner that follows preparation begins and is let go.

        Args:
            steps: how many steps a fresh learner takes again before it can work.
            held: whether an instance is there.
            time_price: instance-seconds of the learner that a second of the step is worth.
            last_seconds: when the last group is expected, in seconds into the step.
        """
        start = self.history.mean(startup("learning")) + self.restart_seconds(steps)
        switch = self.history.mean("draining/learning") + start * (1 + time_price)
        # One that never sleeps has no wakes.
        return LearnerPace(
            self.history.mean("waking/learning") if held else start, max(switch, _LEAST_SWITCH_SECONDS), last_seconds
        )

    def learner_scaling(self, sizes: Sequence[int]) -> dict[int, Measured]:
        """Return the measurements of some numbers of learning instances."""
        return {size: to_judge_by(self._measured("learning", size), self._measured(_FIRST, size)) for size in sizes}

    def _measured(self, kind: str, size: int) -> Measured:
        return Measured(self.history.recent(f"{kind}/token/{size}"), self.history.recent(f"{kind}/rest/{size}"))

    @property
    def knows_learning(self) -> bool:
        """Whether a plan can predict the time of learning, and so when a learner has something to do."""
        return self._spec.planning.policy == "cost" and self.history.mean("learning/token") > 0

    def learners_too_few(self, count: int) -> None:
        """Note that so many learning instances had too little memory."""
        self.history.add("learning/too_few", float(count))

    @property
    def least_learners(self) -> int:
        """Fewest learning instances that may have enough memory, as far as is known."""
        return 1 + int(max(self.history.recent("learning/too_few"), default=0.0))

    def lower_bound(self, generation: GenerationOutcome, prompt_tokens: Sequence[int], seconds: float) -> float | None:
        """Return the least instance-seconds in which these responses could have been generated within `seconds`.

        The bound rests on the known speed of the instances; None if it would say that no schedule could have been so
        fast. If tokens are drafted, the bound takes all drafts as right, since the acceptance of other drafts is
        unknown. Instances that are kept from the step before are charged no start.
        """
        latency: Latency = self.calibration.latency
        if self.room is not None and self.room.longest_draft:
            latency = DraftedLatency(self.calibration.latency, Drafts(1.0, 1.0, self.room.longest_draft))
        prompts = {prompt for prompt, _ in generation.lengths}
        bound = lower_bound(
            np.array(list(generation.lengths.values()), dtype=np.float64),
            np.array([prompt_tokens[prompt] for prompt, _ in generation.lengths], dtype=np.float64),
            latency,
            seconds,
            prefill_tokens=float(sum(prompt_tokens[prompt] for prompt in prompts)),
            start_seconds=generation.weights_seconds,
            max_batch=self.room.sequences if self.room is not None else None,
        )
        return bound if math.isfinite(bound) else None

    # --- learning ---

    def instance_changed(self, change: StateChange) -> None:
        """Learn how long instances take to start, to wake and to end."""
        if (found := self._state_times.observe(change)) is not None:
            self.history.add(*found)

    def generated(
        self, generation: GenerationOutcome, preparation: PreparationOutcome, prompt_tokens: Sequence[int]
    ) -> None:
        """Learn the instances' speed and room, how samples act, and the time of preparation from a step."""
        self.acting.observe(generation.acting)
        self.room = generation.room or self.room
        if generation.weights_seconds > 0:
            self.history.add(WEIGHTS, generation.weights_seconds)
        if generation.switch_pauses:
            self.history.add(SWITCH, fmean(generation.switch_pauses))
        observe(self.calibration, generation, prompt_tokens)
        counts = generation.decoding
        if counts["looked_up"]:
            self.history.add(_COVERAGE, counts["matched"] / counts["looked_up"])
        if counts["judged"]:
            self.history.add(_ACCEPTANCE, counts["accepted"] / counts["judged"])
        if fetched := generation.prefixes.get("tokens_fetched"):
            self.history.add("prefix/token", generation.prefixes["seconds_fetched"] / fetched)
            self.history.add(MEASURED, self._measured_gain(generation.prefixes))
        if sent := generation.prefixes.get("tokens_sent"):
            self.history.add("prefix/sent_token", generation.prefixes["seconds_sent"] / sent)
        if generation.shares_prefixes and generation.stretches and not generation.prefixes:
            self.history.add(UNABLE, 1.0)
        for pause in generation.pauses:
            self.history.add("pause", pause)
        tokens = generation.tokens + sum(prompt_tokens[prompt] for prompt, _ in generation.lengths)
        note_preparation(self.history, preparation, tokens)

    def _measured_gain(self, prefixes: Mapping[str, float]) -> float:
        """Return the instance-seconds of prompts that actors did not compute, less their waits and copies."""
        saved = prefixes["tokens_fetched"] * self.calibration.latency.prefill_token_seconds
        return saved - sum(prefixes.get(f"seconds_{what}", 0.0) for what in ("sent", "fetched", "waited"))

    def measured(self, lengths: Mapping[int, Sequence[int]], prompt_tokens: Sequence[int]) -> None:
        """Learn the lengths of a step's groups, by prompt.

        Args:
            prompt_tokens: of every training prompt, by row.
        """
        for prompt, found in lengths.items():
            self.predictor.observe(prompt, found, prompt_tokens[prompt])

    def learned(self, result: LearnResult) -> None:
        """Learn the time that learning takes."""
        metrics = result.metrics
        waited = metrics.get("seconds/wait", 0.0)
        parts = {"": "seconds", "/train": "seconds/train", "/load": "seconds/load"}
        for name, metric in {**parts, "/beyond": "learning/beyond_preparation"}.items():
            if (seconds := metrics.get(metric)) is not None:
                self.history.add(f"learning{name}", seconds - (waited if metric == "seconds" else 0.0))
        # Tokens that were passed once for several samples are no work, but the plan counts them for each sample.
        tokens = metrics.get("tokens", 0.0) + metrics.get("tokens/shared", 0.0)
        if tokens and "seconds" in metrics and "seconds/train" in metrics:
            self.history.add("learning/token", metrics["seconds/train"] / tokens)
            # A learner that is new, or that slept, has its state before it begins.
            again = sum(metrics.get(f"seconds/{part}", 0.0) for part in ("load", "replay", "wake"))
            rest = max(0.0, metrics["seconds"] - waited - metrics["seconds/train"] - again)
            self.history.add("learning/rest", rest)
            if (count := metrics.get("learning/instances")) is not None and self._spec.chooses_learners:
                kind = _FIRST if "seconds/load" in metrics else "learning"
                self.history.add(f"{kind}/token/{count:.0f}", metrics["seconds/train"] / tokens)
                self.history.add(f"{kind}/rest/{count:.0f}", rest)

    # --- keeping ---

    def state(self) -> dict[str, Any]:
        """Return all JSON values that `restore` needs."""
        return {
            "predictor": self.predictor.state(),
            "acting": self.acting.state(),
            "calibration": self.calibration.state(),
            "history": self.history.state(),
            "room": self.room.model_dump() if self.room is not None else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a `state`."""
        self.predictor = LengthPredictor.from_state(state["predictor"])
        self.calibration = Calibration.from_state(state["calibration"])
        self.history.restore(state["history"])
        self.acting.restore(state["acting"])
        self.room = EngineRoom(**state["room"]) if state["room"] else self.room


def startup(stage: Charged) -> str:
    """Return the name of a stage's start-up times in the history."""
    return f"startup/{stage}"
