"""Dynamic sampling while a rollout goes on: groups that teach nothing are replaced as soon as that is known."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from rlhfless_functions.api import GroupResult, PrepareResult, SampleTask
from rlhfless_operator.planner.groups.dynamic_sampling import SamplingRounds
from rlhfless_operator.training.costs.generation_plan import GenerationPlan
from rlhfless_operator.training.journal.samples import training_examples
from rlhfless_operator.training.run import TrainingRun


class Replacing:
    """Draws the fresh prompts of one rollout, and plans them.

    Args:
        run: the job in hand.
        rounds: of the rollout; the first one is drawn.
        plan: of the first round.
        before: results of the groups that earlier drivers had prepared, by prompt.
    """

    def __init__(
        self, run: TrainingRun, rounds: SamplingRounds, plan: GenerationPlan, before: Mapping[int, GroupResult]
    ) -> None:
        self._run = run
        self._before = before
        self.rounds = rounds
        self._estimates = dict(plan.estimates)
        self.plan = replace(plan, estimates=self._estimates)
        """The plan of the first round. Its estimates become those of all prompts."""
        self.examples = set[SampleTask]()
        """Samples to be had as text."""
        self._arrivals: asyncio.Queue[GenerationPlan | None] = asyncio.Queue()
        self._is_drawn(rounds.drawn)
        self._advance()

    def prepared(self, result: PrepareResult) -> None:
        """Take in a prepared chunk."""
        for group in result.groups:
            self.rounds.settle(group.prompt, teaches=group.teaches)
        self._advance()

    def may_go_on(self) -> bool:
        """Return whether fresh prompts may still be drawn."""
        return not self.rounds.is_over

    async def arrivals(self) -> AsyncIterator[GenerationPlan]:
        """Yield the plans of fresh prompts, until no more will come."""
        while (plan := await self._arrivals.get()) is not None:
            yield plan

    def _advance(self) -> None:
        run, rounds, samples = self._run, self.rounds, self._run.spec.batch.samples_per_prompt
        while count := rounds.count:
            prompts = run.prompts.cursor.draw(count, taken=rounds.drawn)
            rounds.draw(prompts)
            plan = run.plans.plan(prompts, samples, "training")
            self._estimates.update(plan.estimates)
            run.progress.samples += len(prompts) * samples
            self._arrivals.put_nowait(plan)
            self._is_drawn(prompts)
        if rounds.is_over:
            self._arrivals.put_nowait(None)

    def _is_drawn(self, prompts: Sequence[int]) -> None:
        spec = self._run.spec
        self.examples |= training_examples(prompts, spec.tracking.sample_groups, spec.batch.samples_per_prompt)
        for prompt in prompts:
            if (known := self._before.get(prompt)) is not None:
                self.rounds.settle(prompt, teaches=known.teaches)
