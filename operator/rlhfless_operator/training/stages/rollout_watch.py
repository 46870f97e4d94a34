"""Watches a rollout, forecasts its end, and has the instances of each stage ready for their work and not before."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from statistics import fmean

from rlhfless_functions.api import Purpose
from rlhfless_operator.planner.moves.migration import Actor, Key, Migration, Unfinished
from rlhfless_operator.planner.moves.rules import ends_of_groups, seconds_left
from rlhfless_operator.planner.step.chunks import CHUNKS_PER_STEP, least_chunk
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.looks import one_more_rollout, pause_after
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.instances.instance_queue import Part
from rlhfless_operator.training.run import TrainingRun

LOOK_SECONDS = 0.25
"""Least seconds between two looks."""
_LATE_SHARE = 0.05
"""Seconds to the next look, as a share of those since the rollout began and of those left of it."""


class RolloutWatch:
    """Forecasts when a rollout is complete, from the plan and then from what its actors report.

    Preparation begins when what it has to do takes as long as what is left of generation, or earlier where a learner
    follows it. So it works without a pause, and ends no later than if it had begun at once. It is let go while it would
    wait for longer than a start costs.

    Args:
        run: the job in hand.
        purpose: of the rollout.
        plan: the rollout's.
        migration: has the actors' samples.
        generated: samples so far.
        prepared: groups so far.
        preparers: the rollout's part of them; it begins with nothing to do.
        on_forecast: called with the seconds until the learner has work, before instances are kept or started for it;
            returns whether it is being let go or loads its state.
        may_go_on: returns whether fresh prompts may join the plan.
    """

    def __init__(
        self,
        run: TrainingRun,
        purpose: Purpose,
        plan: GenerationPlan,
        migration: Migration,
        generated: GenerationOutcome,
        prepared: PreparationOutcome,
        preparers: Part,
        on_forecast: Callable[[float], bool],
        may_go_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run = run
        self._may_go_on = may_go_on
        self._trains = purpose == "training"
        self._prompt_tokens = run.prompts.tokens(purpose)
        self._planned_seconds, self._groups = plan.planned.expected_generation_seconds, len(plan.estimates)
        self._estimates = plan.estimates
        self._away_token = {prompt: self._away_token_of(prompt) for prompt in plan.estimates}
        """Seconds that samples of each prompt are with their environments, for each token that they sample."""
        self._migration = migration
        self._generated = generated
        self._prepared = prepared
        self._preparers = preparers
        self._on_forecast = on_forecast
        self._prepares = False
        self._is_generated = False
        self._chunk_seconds = 0.0
        self._begun = time.monotonic()
        self._done, self._works_since = 0, 0.0
        """Groups that were prepared at the last look, and the moment since which instances prepare more."""

    @asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Look again and again while the rollout is made."""
        try:
            with one_more_rollout():
                async with asyncio.TaskGroup() as tasks:
                    watching = tasks.create_task(self._watch())
                    yield
                    watching.cancel()
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def all_is_generated(self) -> None:
        """Let instances prepare what is left, since all samples are finished."""
        self._is_generated = True
        await self._may_prepare()

    def more_is_generated(self) -> None:
        """Note that fresh prompts have joined the plan."""
        self._is_generated = False

    async def _watch(self) -> None:
        begun = self._begun = time.monotonic()
        while True:
            looked = time.monotonic()
            # The first assesses the samples.
            generation, preparation = self._generation_seconds(), self._preparation_seconds()
            # Early in a rollout, samples that may not end by themselves make its forecast long. To prepare too early
            # costs an instance's idling, and too late all that wait for the groups.
            planned = max(0.0, self._planned_seconds - (looked - begun))
            load = self._load_seconds()
            await self._pace(min(generation, planned) - max(preparation, self._followed_seconds()) - load)
            left = max(generation + self._last_chunk(preparation), load + preparation)
            await self._foresee(left)
            now = time.monotonic()
            await asyncio.sleep(max(seconds_to_next_look(now - begun, left), pause_after(now - looked)))

    async def _foresee(self, left: float) -> None:
        """Keep, start and let go instances of the other stages, with so many seconds left of the rollout."""
        run, capacity, history = self._run, self._run.capacity, self._run.cost_model.history
        # The learner's work comes after the rollout that follows an evaluation.
        learning = left if self._trains else left + history.mean("rollout")
        if not self._on_forecast(learning) and self._trains:
            await capacity.expect("learning", run.learners.now, run.learner_preload, within=learning)
        # In the first step nothing is known of learning: then this is the earliest moment.
        later = left + history.mean("learning")
        # Groups that are prepared now may have to be replaced.
        await capacity.next_use("generation", left if self._may_go_on() else later)
        await capacity.next_use("preparation", later)

    async def _may_prepare(self) -> None:
        if not self._prepares:
            self._prepares = True
            await self._preparers.has_left(self._preparers.actors)

    @property
    def _actors(self) -> list[Actor]:
        return list(self._migration.actors.values())

    @property
    def _samples(self) -> list[tuple[Key, Unfinished]]:
        return [each for actor in self._actors for each in actor.samples.items()]

    def _away_token_of(self, prompt: int) -> float:
        mean = self._estimates[prompt].mean
        acts = self._run.cost_model.acting.predict(prompt, mean, known=self._trains)
        return acts.away_seconds / max(mean, 1.0)

    def _away(self) -> dict[int, float]:
        """Return the longest time that a sample of each prompt is still to be with its environment, in seconds, in
        proportion to the tokens that are left."""
        left = dict[int, float]()
        if self._run.spec.environment is not None:
            for fresh in self._estimates.keys() - self._away_token.keys():
                self._away_token[fresh] = self._away_token_of(fresh)
            seen = None if any(self._away_token.values()) else self._away_so_far()
            for (prompt, _), sample in self._samples:
                token = self._away_token[prompt] if seen is None else seen
                left[prompt] = max(left.get(prompt, 0.0), sample.remaining * token)
        return left

    def _away_so_far(self) -> float:
        """Return the seconds away for each token, as a rollout shows it of which nothing was known: by the samples that
        are finished, or else by how slowly the others get their tokens."""
        acted, lengths = self._generated.acting, self._generated.lengths
        if acted:
            return sum(each.away_seconds for each in acted.values()) / max(1, sum(lengths[key] for key in acted))
        tokens = [sample.tokens for _, sample in self._samples]
        return (time.monotonic() - self._begun) / max(1.0, fmean(tokens)) if tokens else 0.0

    def _generation_seconds(self) -> float:
        if self._is_generated:
            return 0.0
        if not self._migration.actors and not self._generated.lengths:
            return self._planned_seconds
        self._migration.assess()
        longest = self._run.spec.sampling.max_response_tokens
        away = max(self._away().values(), default=0.0)
        return seconds_left(self._actors, self._run.cost_model.latency, longest) + away

    def _preparation_seconds(self) -> float:
        """Return the seconds that preparing all groups takes that are not prepared yet; 0 if nothing is known."""
        whole = self._unprepared_tokens() * self._preparation_token_seconds() / self._preparers.actors
        # A chunk counts as prepared once all of it is.
        now, done = time.monotonic(), len(self._prepared.groups)
        if done != self._done or not self._preparers.works:
            self._done, self._works_since = done, now
        return max(0.0, whole - (now - self._works_since))

    def _load_seconds(self) -> float:
        """Return the seconds in which instances load the models, before they prepare the first groups."""
        return 0.0 if self._done else self._run.cost_model.history.mean("preparation/load")

    def _unprepared_tokens(self) -> float:
        """Return the tokens of all samples whose groups are not prepared yet."""
        done = self._prepared.groups
        tokens = sum(
            self._prompt_tokens[prompt] + length
            for (prompt, _), length in self._generated.lengths.items()
            if prompt not in done
        )
        return tokens + sum(sample.context + sample.remaining for _, sample in self._samples)

    def _followed_seconds(self) -> float:
        """Return the seconds of learning that follows preparation, and that needs prepared groups so much earlier."""
        if not self._trains or not self._run.requests.learns_in_pieces:
            return 0.0
        return self._unprepared_tokens() * self._run.cost_model.history.mean("learning/token")

    def _preparation_token_seconds(self) -> float:
        """Return the seconds of preparing a token, by earlier steps or else by this rollout; 0 if nothing is known."""
        if known := self._run.cost_model.history.mean("preparation/token"):
            return known
        lengths, done = self._generated.lengths.items(), self._prepared.groups
        tokens = sum(self._prompt_tokens[prompt] + length for (prompt, _), length in lengths if prompt in done)
        return self._prepared.seconds / tokens if tokens else 0.0

    def _last_chunk(self, preparation: float) -> float:
        self._chunk_seconds = self._chunk_seconds or preparation / CHUNKS_PER_STEP
        return min(preparation, self._chunk_seconds)

    def _chunk_in(self) -> float:
        """Return the seconds until there is something to prepare: a chunk of groups, or the last of them."""
        if self._is_generated or (not self._migration.actors and not self._generated.lengths):
            return self._generation_seconds()
        ends = ends_of_groups(self._actors, self._run.cost_model.latency)
        for prompt, left in self._away().items():
            ends[prompt] = max(ends[prompt], left)
        finished = {prompt for prompt, _ in self._generated.lengths} - self._prepared.groups.keys() - ends.keys()
        least = least_chunk(self._groups, self._preparers.actors)
        lacking = min(least - len(finished), len(ends))
        return sorted(ends.values())[lacking - 1] if lacking > 0 else 0.0

    async def _pace(self, slack: float) -> None:
        """Begin to prepare, or stop while there is nothing to prepare for long.

        Args:
            slack: seconds of generation that are left beyond those of preparation.
        """
        capacity, chunk = self._run.capacity, self._chunk_in()
        start = capacity.startup_seconds("preparation")
        if not self._prepares:
            # As long as its rate is unknown, it begins with the first groups.
            if chunk <= start and (slack <= start or not self._preparation_token_seconds()):
                await self._may_prepare()
        elif not self._preparers.works and chunk > start + capacity.switch_seconds("preparation"):
            self._prepares = False
            await capacity.next_use("preparation", chunk)
            await self._preparers.has_left(0)


def seconds_to_next_look(since: float, left: float) -> float:
    """Return the seconds after which a new forecast may say something else.

    It changes quickly while it is young and near the end, and slowly in between.

    Args:
        since: seconds since the rollout began.
        left: seconds left of it, by the last look.
    """
    return max(LOOK_SECONDS, _LATE_SHARE * min(since, left))


async def expect_learner(run: TrainingRun, planned_seconds: float) -> None:
    """Have the learner ready where no forecast of the rollout decides on it.

    Args:
        planned_seconds: of generation, by the plan.
    """
    if run.spec.asynchronous is not None and run.capacity.holds("learning"):
        # Its next step may be of an earlier rollout.
        return
    if run.capacity.sleeps:
        # A sleeping instance costs nothing.
        within = 0.0
    elif run.requests.learns_in_pieces:
        within = planned_seconds / CHUNKS_PER_STEP
    else:
        within = planned_seconds
    await run.capacity.expect("learning", run.learners.now, run.learner_preload, within=within)
