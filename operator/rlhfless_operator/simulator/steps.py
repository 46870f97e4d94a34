"""A run of several steps under one policy: its time, its cost, and its distance from the bound."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.lengths import LengthPredictor, assess
from rlhfless_operator.planner.moves.rules import Saving
from rlhfless_operator.planner.step.bounds import lower_bound
from rlhfless_operator.planner.step.forecast import Training
from rlhfless_operator.planner.step.generation import ExpectedSamples, StepSetting, plan_generation
from rlhfless_operator.planner.step.holding import Holding
from rlhfless_operator.planner.step.loads import Indices, Loads
from rlhfless_operator.planner.step.overlap import TrainerPlan, TrainerRun, free_gpus, run_trainer
from rlhfless_operator.planner.step.pace import LearnerPace, run_paced
from rlhfless_operator.planner.step.planning import Limits
from rlhfless_operator.planner.step.whole_step import StepPlan
from rlhfless_operator.simulator.acted import Acted
from rlhfless_operator.simulator.divisions import equal_shares, ranked_shares
from rlhfless_operator.simulator.foresight import Foresight
from rlhfless_operator.simulator.generation import GenerationRun, Handling, Held, run_generation
from rlhfless_operator.simulator.instance import LettingGo, Response
from rlhfless_operator.simulator.own_stages import OwnStages, best_of, learner_sizes
from rlhfless_operator.simulator.policies import PolicySettings
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.step_bound import least_gpu_seconds
from rlhfless_operator.simulator.traces import RecordedTrace, Trace, TraceStep

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepResult:
    """One training step."""

    epoch: int
    seconds: float
    generation_seconds: float
    gpu_seconds: float
    generation_gpu_seconds: float
    busy_gpu_seconds: float
    bound_gpu_seconds: float
    """Lower bound of the whole step in the same time."""
    generation_bound_gpu_seconds: float
    instances: int
    moves: int
    lost: int
    rank_correlation: float | None
    held: tuple[Held, ...]
    """The generation instances."""
    trainer: TrainerRun


class Run:
    """A run of one policy on one trace. It keeps what the policy learns from step to step."""

    def __init__(
        self,
        scenario: Scenario,
        settings: PolicySettings,
        trace: Trace | RecordedTrace,
        seed: int,
        own: OwnStages | None = None,
    ) -> None:
        self._scenario, self._settings, self._trace, self._own = scenario, settings, trace, own
        self._profile = self._profile_in(epoch=0)
        self._random = np.random.default_rng(seed)
        longest = scenario.lengths.longest
        # As the live loop's cost model.
        default = longest / 2 if settings.planning == "optimal" else longest / 4
        self._predictor = LengthPredictor(default_tokens=default, longest=longest)
        self._acted = Acted()
        self._trainer: TrainerPlan | None = None
        self._foreseen: Mapping[int, float] = {}
        """Moment at which the plan expects each prompt's group."""
        self._price = 0.0
        """GPU-seconds that a second of the step is worth."""
        self._trainer_gpus = scenario.gpus
        self._held_gpus = scenario.gpus if settings.holds_everything else 0
        """GPUs that keep both models from the step before."""
        self._holds = settings.holds_everything
        """Whether this step's GPUs keep both models."""
        self._preparers = 0
        """Number of instances that prepare, by the plan; 0 if preparation has none of its own."""
        self._stayed: tuple[int, int] | None = None
        """Generation and preparation instances that stayed in the step before; None before the first."""
        self._learnt_beyond = 0.0
        """Seconds between the end of generation and that of the step before, in which actors of this one start."""
        self._stays = False
        """Whether the instances of all stages of its own stay for this step."""

    @property
    def _update_seconds(self) -> float:
        """Seconds of the optimizer's step and of publishing, by a learner on all free GPUs."""
        scenario = self._scenario
        if self._settings.publishes_beside:
            return scenario.update_seconds
        return scenario.update_seconds - scenario.publishing_seconds + scenario.store_seconds(scenario.gpus)

    def _profile_in(self, epoch: int) -> InstanceProfile:
        profile = self._scenario.profile(drafts=self._settings.drafts and epoch > 0)
        return profile if self._settings.starts else replace(profile, startup_seconds=0.0)

    def step(self, groups: TraceStep) -> StepResult:
        """Take one step over these groups."""
        scenario, settings, trace = self._scenario, self._settings, self._trace
        self._profile = self._profile_in(groups.epoch)
        lengths = groups.lengths
        prompts = list(lengths)
        estimates = {prompt: self._predictor.predict(prompt, int(trace.prompt_tokens[prompt])) for prompt in prompts}
        responses = groups.responses(trace.prompt_tokens)
        acting = {prompt: self._acted.predictor.predict(prompt, estimates[prompt].mean) for prompt in prompts}
        foresight = Foresight(settings, responses, estimates, scenario.lengths.longest, acting)
        division, price = self._divide(responses, foresight)
        gpus = scenario.gpus if settings.holds_everything else len(division) * scenario.gpus_per_instance
        begun = self._begin_holding(gpus)
        generation = self._generate(responses, division, foresight, price, held=self._holds and begun == 0)
        completions, work, preparation = self._groups(groups, generation)
        trainer = self._train(prompts, generation, completions, work, preparation)
        end = trainer.end
        self._trainer_gpus = trainer.gpus
        self._learnt_beyond = end - generation.seconds
        held = sum(each.seconds for each in generation.held) * scenario.gpus_per_instance
        busy = sum(each.busy for each in generation.held) * scenario.gpus_per_instance + float(work.sum())
        total = gpus * end + begun if self._holds else held + trainer.gpu_seconds - self._kept(generation, trainer)
        if self._own is not None:
            there = (len(division), self._preparers) if self._stays else (0, 0)
            if self._stays:
                staying, starts = self._own.stay(*there, self._stayed or (0, 0))
                total = staying * end + starts
            self._stayed = there
        bound = self._bound(responses, generation.seconds)
        prompt_tokens = [int(tokens) for tokens in trace.prompt_tokens]
        starts = settings.starts and not self._holds
        least = least_gpu_seconds(scenario, lengths, prompt_tokens, end, starts=starts, drafts=groups.epoch > 0)
        for prompt in prompts:
            self._predictor.observe(prompt, lengths[prompt], prompt_tokens[prompt])
        self._acted.observe(groups)
        return StepResult(
            epoch=groups.epoch,
            seconds=end,
            generation_seconds=generation.seconds,
            gpu_seconds=total,
            generation_gpu_seconds=gpus * generation.seconds if self._holds else held,
            busy_gpu_seconds=busy,
            bound_gpu_seconds=least,
            generation_bound_gpu_seconds=bound,
            instances=len(division),
            moves=generation.moves,
            lost=generation.lost,
            rank_correlation=assess(estimates, lengths).rank_correlation,
            held=tuple(generation.held),
            trainer=trainer,
        )

    def _divide(self, responses: list[Response], foresight: Foresight) -> tuple[Sequence[Indices], float]:
        """Return shares as numbers of responses, and the price of a second of the step in instance-seconds."""
        scenario, profile = self._scenario, self._profile
        samples = foresight.samples()
        if self._settings.planning == "optimal":
            step = self._plan_whole_step(samples)
            place = {each.key: number for number, each in enumerate(responses)}
            division = [
                np.array([place[sample.prompt, sample.index] for sample in share.samples])
                for share in step.generation.shares
            ]
            return division, step.time_price / scenario.gpus_per_instance
        columns = Loads(samples.loads, profile.latency, kv_tokens=profile.kv_tokens, max_batch=scenario.max_batch)
        if self._settings.planning == "even":
            generating = max(1, round(self._settings.generating_share * scenario.instances))
            return equal_shares(np.arange(columns.groups), columns, generating), 0.0
        start = profile.startup_seconds + profile.weight_load_seconds
        return ranked_shares(columns, scenario.instances, scenario.cost_weight, start), 0.0

    def _plan_whole_step(self, samples: ExpectedSamples) -> StepPlan:
        """Plan as live jobs do, and remember the trainer."""
        scenario, settings, profile = self._scenario, self._settings, self._profile
        limits = Limits(1, self._own.most_instances if self._own is not None else scenario.instances)
        if settings.knows_batch:
            limits = replace(limits, kv_tokens=profile.kv_tokens, max_batch=scenario.max_batch)
        both_start = scenario.startup_seconds + scenario.trainer_start_seconds
        if self._own is not None:
            training = self._own.training(self._stayed, self._learnt_beyond)
        else:
            training = Training(
                scenario.gpus,
                scenario.preparation_gpu_seconds(1.0) + scenario.learning_gpu_seconds(1.0),
                scenario.trainer_start_seconds,
                self._update_seconds,
            )
        setting = StepSetting(
            profile,
            limits,
            training,
            cost_weight=scenario.cost_weight,
            holding=Holding(self._held_gpus, profile.startup_seconds, both_start) if settings.may_hold else None,
        )
        step = plan_generation("cost", samples, setting).whole
        assert step is not None, "the policy plans whole steps"
        self._trainer, self._foreseen = step.trainer, step.expected_groups
        self._price, self._preparers = step.time_price, step.preparers
        self._stays = step.holds and self._own is not None
        self._holds = step.holds and self._own is None
        return step

    def _generate(
        self, responses: list[Response], division: Sequence[Indices], foresight: Foresight, price: float, *, held: bool
    ) -> GenerationRun:
        """Run generation.

        Args:
            price: of a second of the step, in instance-seconds.
            held: whether the instances were kept from the step before.
        """
        scenario, settings = self._scenario, self._settings
        profile, longest = self._profile, scenario.lengths.longest
        # A start-up is hidden under the learner if there are GPUs for both.
        room = self._trainer_gpus + len(division) * scenario.gpus_per_instance <= scenario.gpus
        hidden = held or (settings.warms and room)
        if self._own is not None:
            # The learner's GPUs are others, where starts can be hidden at all.
            hidden = held or not (scenario.sleeps or self._stayed is None)
        rule = settings.rule(scenario, profile, len(responses), price) if settings.rule else None
        if isinstance(rule, Saving) and self._own is not None and self._trainer is not None:
            tokens = sum(each.prompt_tokens + each.expected_tokens for each in foresight.samples().loads)
            rule.learner = self._own.waiting_learner(tokens, self._preparers, self._trainer.begin)
        start = profile.startup_seconds + profile.weight_load_seconds
        # If not all stages have room at a time, some actors wait until the learner has left its GPUs.
        late = 0.0
        if self._own is not None and self._stayed is not None:
            fresh = len(division) > self._stayed[0]
            late = self._own.late_seconds(self._learnt_beyond) if fresh else 0.0
            late += 0.0 if room else self._own.move_seconds
        handling = Handling(
            rule=rule,
            tick_seconds=settings.tick_seconds * max(1.0, longest / 2048),
            restarts_receiver=settings.restarts_receiver,
            pause_seconds=settings.pause_seconds,
            ready_seconds=profile.weight_load_seconds + late + (0.0 if hidden else profile.startup_seconds),
            failures_per_hour=scenario.failures_per_hour,
            letting_go=LettingGo(start, start) if settings.lets_go else None,
        )
        shares = [[responses[i] for i in chosen] for chosen in division]
        return run_generation(
            shares,
            profile,
            foresight.outlook,
            handling,
            max_batch=scenario.max_batch,
            random=self._random,
        )

    def _begin_holding(self, gpus: int) -> float:
        """Return the GPU-seconds to start both models on those of a step's GPUs that hold nothing yet."""
        before, self._held_gpus = self._held_gpus, gpus if self._holds else 0
        starts = self._scenario.startup_seconds + self._scenario.trainer_start_seconds
        return max(0, self._held_gpus - before) * starts

    def _kept(self, generation: GenerationRun, trainer: TrainerRun) -> float:
        """Return the GPU-seconds that the starts of whole pods cost less where they were kept instead: those that idled
        from their end in the step before for less than a start. Steps are taken to be alike."""
        if self._own is None or self._scenario.sleeps or self._stayed is None:
            return 0.0
        saved = [max(0.0, self._scenario.startup_seconds - (trainer.end - each.end)) for each in generation.held]
        return math.fsum(saved) * self._scenario.gpus_per_instance

    def _groups(self, groups: TraceStep, generation: GenerationRun) -> tuple[Floats, Floats, Floats]:
        """Return each group's moment of completion, its GPU-seconds of preparation and learning, and those of
        preparation alone [groups]."""
        scenario, lengths = self._scenario, groups.lengths
        completions = np.array(
            [max(generation.ends[prompt, index] for index in range(len(lengths[prompt]))) for prompt in lengths]
        )
        tokens = np.array(
            [
                float(self._trace.prompt_tokens[prompt]) * len(group) + sum(group) + groups.given_tokens(prompt)
                for prompt, group in lengths.items()
            ]
        )
        preparation = tokens * scenario.preparation_gpu_seconds(1.0)
        return completions, preparation + tokens * scenario.learning_gpu_seconds(1.0), preparation

    def _train(
        self, prompts: Sequence[int], generation: GenerationRun, completions: Floats, work: Floats, preparation: Floats
    ) -> TrainerRun:
        """Run preparation and learning."""
        scenario, settings = self._scenario, self._settings
        start = scenario.trainer_start_seconds if settings.starts else 0.0
        update = self._update_seconds
        free = self._free(generation)
        if self._own is not None and not self._holds:
            instances = [each.end for each in generation.held]
            learning, there = work - preparation, self._stayed is not None
            given = completions, preparation, learning, instances, self._preparers
            if self._own.follows and (there or scenario.sleeps):
                foreseen = np.array([self._foreseen[prompt] for prompt in prompts]) if there else None
                return self._own.follow(*given, expected=foreseen, time_price=self._price, stays=self._stays)
            return self._own.run(*given, is_there=there, stays=self._stays)
        every, after = scenario.gpus, generation.seconds
        if self._holds and not settings.holds_everything:
            own = free_gpus([each.end for each in generation.held], self._held_gpus, scenario.gpus_per_instance)
            arrivals = completions if settings.overlaps_learning else np.full(len(work), after)
            everything = TrainerPlan(self._held_gpus, 0.0)
            return run_trainer(arrivals, work, own, everything, start_seconds=0.0, update_seconds=update)
        if settings.learns_from is not None:
            half = np.sort(completions)[math.ceil(settings.learns_from * len(completions)) - 1]
            plan = TrainerPlan(every, float(half) - start)
            return run_trainer(completions, work, free, plan, start_seconds=start, update_seconds=update)
        if settings.overlaps_learning and self._trainer is not None:
            foreseen = np.array([self._foreseen[prompt] for prompt in prompts])
            expected = completions if "arrivals" in settings.told else foreseen
            # If the last group is waited for, letting go delays the end by a start.
            if not settings.paces:
                return run_trainer(completions, work, free, self._trainer, start_seconds=start, update_seconds=update)
            switch = start * (1 + self._price / self._trainer.gpus)
            pace = LearnerPace(start, switch, float(expected.max()))
            return run_paced(completions, expected, work, free, self._trainer.gpus, pace, update_seconds=update)
        afterwards = TrainerPlan(every, after - start)
        if settings.overlaps_preparation:
            # Complete groups are prepared on freed GPUs; that time is charged without idle time.
            early = run_trainer(
                completions, preparation, free, TrainerPlan(every, 0.0), start_seconds=0.0, update_seconds=0.0
            )
            prepared = np.full(len(work), max(after, early.end))
            afterwards = TrainerPlan(every, float(prepared[0]) - start)
            run = run_trainer(
                prepared, work - preparation, free, afterwards, start_seconds=start, update_seconds=update
            )
            return replace(run, gpu_seconds=run.gpu_seconds + float(preparation.sum()))
        ends = np.full(len(work), after)
        # A GPU that still generates is not the learner's yet.
        return run_trainer(ends, work, free, afterwards, start_seconds=start, update_seconds=update)

    def _free(self, generation: GenerationRun) -> Floats:
        scenario, settings = self._scenario, self._settings
        if settings.holds_everything and settings.generating_share < 1:
            return free_gpus([], scenario.gpus - len(generation.held) * scenario.gpus_per_instance, 1)
        return free_gpus([each.end for each in generation.held], scenario.gpus, scenario.gpus_per_instance)

    def _bound(self, responses: list[Response], seconds: float) -> float:
        """Return the GPU-seconds of generation that no policy can beat in `seconds`."""
        profile = replace(self._profile, startup_seconds=0.0) if self._holds else self._profile
        prompts = {each.prompt: each.prompt_tokens for each in responses}
        bound = lower_bound(
            np.array([each.length for each in responses], dtype=np.float64),
            np.array([each.prompt_tokens for each in responses], dtype=np.float64),
            profile.latency,
            # Start-ups may be hidden from the time, but are always charged.
            seconds + profile.startup_seconds,
            prefill_tokens=float(sum(prompts.values())),
            start_seconds=profile.startup_seconds + profile.weight_load_seconds,
            max_batch=self._scenario.max_batch,
        )
        return bound * profile.gpus


Progress = Callable[[], None]


def run_policy(
    scenario: Scenario,
    settings: PolicySettings,
    trace: Trace | RecordedTrace,
    seed: int,
    progress: Progress = lambda: None,
) -> list[StepResult]:
    """Take all steps of the trace, and call `progress` after each."""
    own = own_stages(scenario, settings) if settings.own_stages else None
    run = Run(scenario, settings, trace, seed, own)
    random = np.random.default_rng(seed)
    results = []
    for groups in trace.steps(scenario.prompts_per_step, random):
        results.append(run.step(groups))
        progress()
    return results


_TRIAL_SEED = 2**20
"""Seed of the lengths by which a job's settings are chosen; no run has them."""


@lru_cache(maxsize=64)
def own_stages(scenario: Scenario, settings: PolicySettings) -> OwnStages:
    """Return the stages of a job whose learner has the GPUs that suit the scenario best by its λ, as a user would find
    with `rlhfless plan`: those of a step of typical lengths, after one in which the lengths were learnt."""
    trial = replace(scenario, epochs=2, steps_per_epoch=1)
    trace = trial.draw_trace(_TRIAL_SEED)
    more = settings.publishes_beside, settings.overlaps_learning
    options = [OwnStages(scenario, size, *more) for size in learner_sizes(scenario)]
    rows = []
    for own in options:
        run = Run(trial, settings, trace, 0, own)
        *_, step = [run.step(groups) for groups in trace.steps(trial.prompts_per_step, np.random.default_rng(0))]
        rows.append((step.seconds, step.gpu_seconds))
    return options[best_of(rows, scenario.cost_weight)]
