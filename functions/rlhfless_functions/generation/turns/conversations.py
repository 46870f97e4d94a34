"""The samples of a share that talk to environments: a turn that has ended leaves the batch and comes back by itself.

A sample is in one of four places: in the engine's run; away, with its environment; answered, until the answer is
stored; finished. No sample waits for another. The tokens of a sample depend neither on the time of an answer nor on the
other samples, because its random numbers are those of its own positions.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rlhfless_functions.api import FinishReason
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.environments.episodes import Episodes, Observation, SampleKey, Turn
from rlhfless_functions.generation.engines.base import EngineRun, SequenceResult, SequenceTask
from rlhfless_functions.runtime.activity import limited_wait

AWAY_SECONDS = 0.1
"""Longest wait for an answer while all samples are away."""
STORING_SECONDS = 0.002
"""Longest such wait while answers are being stored."""

Given = list[tuple[int, int]]
"""Spans of a response that nobody sampled."""


class Conversations:
    """The conversations of a share.

    Args:
        episodes: the environments.
        prompts: prompts of the share by row.
        longest: most tokens of a response, given ones included.
    """

    def __init__(self, episodes: Episodes, prompts: Mapping[int, Prompt], longest: int) -> None:
        self._episodes = episodes
        self._prompts = prompts
        self._longest = longest
        self._given: dict[SampleKey, Given] = {}
        self._tasks: dict[SampleKey, SequenceTask] = {}
        """Every unfinished sample as the engine had it last, or as the environment has it now."""
        self._away: set[SampleKey] = set()
        self._begun: set[SampleKey] = set()
        """Samples that have been in the run."""
        self._answered: list[SampleKey] = []
        self._stored: list[SampleKey] = []
        self._outcomes: dict[SampleKey, dict[str, Any]] = {}
        self.restarted: set[SampleKey] = set()
        """Samples whose earlier response is void, because their episodes began anew."""

    @property
    def away(self) -> int:
        """Number of samples that are not in the run, and unfinished."""
        return len(self._away) + len(self._answered) + len(self._stored)

    @property
    def waiting(self) -> int:
        """Number of samples whose environments have not answered."""
        return len(self._away)

    @property
    def unstored(self) -> bool:
        """Whether there are answers that must be stored before their samples go on."""
        return bool(self._answered)

    def given(self, key: SampleKey) -> Given:
        """Return the spans of a response that nobody sampled."""
        return list(self._given.get(key, ()))

    def outcome(self, key: SampleKey) -> dict[str, Any] | None:
        """Return the outcome of a finished episode."""
        return self._outcomes.get(key)

    def begin(
        self, run: EngineRun, tasks: Sequence[SequenceTask], earlier: Mapping[SampleKey, GeneratedSample]
    ) -> None:
        """Take the samples whose environments must speak next out of a run, and ask for their answers.

        Args:
            run: the samples wait in it.
            tasks: the samples that begin.
            earlier: what earlier attempts left of them.
        """
        asked = []
        for task in tasks:
            key = (task.prompt, task.index)
            self._tasks[key] = task
            before = earlier.get(key)
            if before is not None:
                self._given[key] = list(before.given)
            if not task.response_tokens or (before is not None and before.finish_reason == "turn"):
                asked.append(task)
            else:
                self._begun.add(key)
        run.expect_returns()
        run.remove([task.key for task in asked])
        for task in asked:
            self._ask((task.prompt, task.index))

    def move(self, run: EngineRun) -> None:
        """Go on in another run, with all unfinished samples. Those that are away or answered leave it."""
        run.expect_returns()
        run.remove([self._tasks[key].key for key in [*self._away, *self._answered, *self._stored]])

    def take(self, run: EngineRun, results: list[SequenceResult], among: int = 1) -> list[SequenceResult]:
        """Send ended turns to their environments, take in the answers that have come, and return finished samples.

        Args:
            among: number of shares that divide the wait for answers while nothing is left to compute.
        """
        for result in results:
            key = (result.prompt, result.index)
            tokens, log_probs = result.response_tokens, result.log_probs
            self._tasks[key] = replace(self._tasks[key], response_tokens=tokens, log_probs=log_probs)
            self._ask(key)
        answers = self._answers(run, among)
        return [finished for answer in answers if (finished := self._answer(run, answer)) is not None]

    def storing(self) -> None:
        """Note that everything that is unfinished now is being stored."""
        self._stored += self._answered
        self._answered = []

    def go_on(self, run: EngineRun) -> None:
        """Give the samples whose answers are stored back to the run."""
        for key in self._stored:
            self._add(run, self._tasks[key])
        self._stored = []

    def _add(self, run: EngineRun, task: SequenceTask) -> None:
        key = (task.prompt, task.index)
        run.add(task, returns=key in self._begun)
        self._begun.add(key)

    def unfinished(self) -> list[SequenceResult]:
        """Return every unfinished sample with response tokens that is not in the run."""
        return [
            self._result(key, "turn" if key in self._away else "cut")
            for key in [*self._away, *self._answered, *self._stored]
            if self._tasks[key].response_tokens
        ]

    def _answers(self, run: EngineRun, among: int) -> list[Observation]:
        """Return the answers that have come. Wait for one only while nothing is left to compute."""
        seconds = AWAY_SECONDS / among
        if run.running or run.waiting:
            seconds = 0.0
        elif self._answered or self._stored:
            seconds = STORING_SECONDS
        if not self._away:
            time.sleep(seconds)
            return []
        # The environments limit the time of their calls.
        with limited_wait(seconds):
            return self._episodes.ready(seconds)

    def _ask(self, key: SampleKey) -> None:
        task, prompt = self._tasks[key], self._prompts[key[0]]
        said = prompt.text if prompt.messages is None else prompt.messages
        room = self._longest - len(task.response_tokens)
        self._away.add(key)
        self._episodes.submit(
            Turn(
                sample=key,
                row={**prompt.columns, "prompt": said, "ground_truth": prompt.ground_truth},
                response=task.response_tokens,
                given=self.given(key),
                seed=task.seed,
                truncated=room <= 0,
                room=room,
                step=task.step,
            )
        )

    def _answer(self, run: EngineRun, answer: Observation) -> SequenceResult | None:
        """Take in an answer; return the sample if it is finished."""
        key, task = answer.sample, self._tasks[answer.sample]
        self._away.remove(key)
        truncated = len(task.response_tokens) >= self._longest
        if answer.restarted:
            task = replace(task, response_tokens=(), log_probs=())
            self._given.pop(key, None)
            self.restarted.add(key)
            truncated = False
        start, end = len(task.response_tokens), len(task.response_tokens) + len(answer.tokens)
        if end > self._longest or (end == self._longest and not answer.done):
            raise ValueError(
                f"the environment of sample {key} answered with {len(answer.tokens)} tokens after {start} of at most"
                f" {self._longest}"
            )
        if answer.tokens:
            self._given.setdefault(key, []).append((start, end))
            task = replace(
                task,
                response_tokens=[*task.response_tokens, *answer.tokens],
                log_probs=[*task.log_probs, *[0.0] * len(answer.tokens)],
            )
        self._tasks[key] = task
        if not answer.done:
            if answer.tokens:
                self._answered.append(key)
            else:
                self._add(run, task)
            return None
        if answer.outcome is not None:
            self._outcomes[key] = asdict(answer.outcome)
            truncated = truncated or answer.outcome.ended == "maxTokens"
        return self._result(key, "truncated" if truncated else "stop")

    def _result(self, key: SampleKey, reason: FinishReason) -> SequenceResult:
        task = self._tasks[key]
        tokens, log_probs = list(task.response_tokens), list(task.log_probs)
        return SequenceResult(task.prompt, task.index, tokens, log_probs, reason, task.step)
