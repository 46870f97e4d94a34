"""The work of one request: generates its share of the samples, publishes them, and reports on them."""

import logging
from collections import Counter
from collections.abc import Callable

from rlhfless_functions import artifacts
from rlhfless_functions.api import DecodeCounts, GenerationRequest, GenerationResult, Progress, WeightsFetched
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import GeneratedSample, continued_spans
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.generation.engines.base import (
    ComputedTokens,
    Engine,
    EngineRun,
    NonFiniteLogitsError,
    SequenceResult,
    SequenceTask,
    SharedPrefix,
)
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.prefetching import WeightsPrefetcher
from rlhfless_functions.generation.resumption import EarlierSamples
from rlhfless_functions.generation.rollout_files import FlushSchedule, RolloutPublisher
from rlhfless_functions.generation.turns.conversations import Conversations
from rlhfless_functions.runtime.task import TaskContext, TaskError

logger = logging.getLogger(__name__)


class Share:
    """The progress of one request: its finished and pending samples, and the times of its reports."""

    def __init__(
        self,
        request: GenerationRequest,
        context: TaskContext,
        prompts: dict[int, Prompt],
        earlier: EarlierSamples,
        publisher: RolloutPublisher,
        clock: Callable[[], float],
        episodes: Episodes | None = None,
    ) -> None:
        self._request = request
        self._context = context
        self._prompts = prompts
        self._publisher = publisher
        self._clock = clock
        self._earlier_spans = {key: rollout.versions for key, rollout in earlier.partial.items()}
        finished = {rollout.key for rollouts in earlier.finished.values() for rollout in rollouts}
        prefixes = _shared_prefixes(request)
        self.tasks = [
            _task(
                request,
                prompts[sample.prompt],
                sample.index,
                earlier.partial.get((sample.prompt, sample.index)),
                prefixes.get(sample.prompt),
            )
            for sample in request.samples
            if (sample.prompt, sample.index) not in finished
        ]
        self._conversations: Conversations | None = None
        if episodes is not None:
            given = {key: rollout.given for key, rollout in earlier.partial.items()}
            away = [key for key, rollout in earlier.partial.items() if rollout.finish_reason == "turn"]
            longest = request.sampling.max_response_tokens
            self._conversations = Conversations(episodes, prompts, longest, given, away)
        self._finished = len(finished)
        self._left_of_group = Counter(task.prompt for task in self.tasks)
        self._pending: list[GeneratedSample] = []
        self.weights_seconds = 0.0
        self.weights_fetched = WeightsFetched()
        self._run: EngineRun | None = None

    def open(self, engine: Engine) -> EngineRun:
        """Give the share to an engine."""
        request = self._request
        self._run = engine.start(
            self.tasks, request.sampling, request.kv_budget_tokens, request.drafts, keep_kv_cache=request.keep_kv_cache
        )
        if self._conversations is not None:
            self._conversations.open(self._run)
        return self._run

    def generate(self, run: EngineRun, prefetcher: WeightsPrefetcher) -> None:
        """Step until the share is done or the task is told to stop, and publish along the way."""
        request = self._request
        # Measure from here: the time before says nothing about the instance's speed.
        remote = artifacts.local_path(request.weights.adapter or request.weights.uri) is None
        settled = prefetcher.settled
        told_once = {"room": run.room, "weights_bytes": self.weights_fetched.bytes if remote else None}
        self._context.emit(self._progress(run, settled).model_copy(update=told_once))
        now = began = self._clock()
        schedule = FlushSchedule(len(self.tasks), self._request.flush_seconds, now)
        told = now
        # This part has the samples of all sinks, for a later attempt.
        self._publish(partials=True)
        first = True
        while (run.running or run.waiting or self._away) and self._context.stop_reason is None:
            self._take(self._step(run), schedule)
            now = self._clock()
            if first:
                first = False
                seconds = {"weights_seconds": round(self.weights_seconds, 4), "pass_seconds": round(now - began, 4)}
                logger.info("first tokens sampled", extra={"fields": seconds})
            self._publisher.check()
            due = schedule.due(now, len(self._pending))
            if self._conversations is not None and self._publisher.idle:
                self._conversations.go_on(run)
                due = "everything" if self._conversations.unstored else due
            if due != "nothing" and self._publisher.idle:
                self._publish(partials=due == "everything")
                schedule.flushed(now)
            if now - told >= self._request.progress_seconds or prefetcher.settled != settled:
                settled = prefetcher.settled
                self._context.emit(self._progress(run, settled))
                told = now
        self._publish(partials=True)
        run.close()

    def result(self) -> GenerationResult:
        """Return the result of the share."""
        computed = self._run.computed if self._run else ComputedTokens()
        return GenerationResult(
            finished=self._finished,
            unfinished=len(self._request.samples) - self._finished,
            parts=self._publisher.parts,
            prompt_tokens=computed.prompt,
            response_tokens=computed.response,
            weights_seconds=self.weights_seconds,
            weights_fetched=self.weights_fetched,
            shared_prefixes=self._run.prefix_traffic() if self._run else {},
            decoding=self._run.decoding() if self._run else DecodeCounts(),
        )

    def _step(self, run: EngineRun) -> list[SequenceResult]:
        try:
            results = run.step()
            return results if self._conversations is None else self._conversations.take(run, results)
        except TaskError:
            # The engine has failed, but its earlier samples are valid: publish them for the next attempt.
            self._publish(partials=True)
            raise
        except NonFiniteLogitsError as error:
            raise TaskError(
                "non_finite_sample",
                f"step {self._request.key.step}: weights version {self._request.weights.version} gave NaN or infinite"
                f" logits for prompt {error.prompt}, sample {error.index}, response token {error.position}: the policy"
                " has diverged; return to an earlier version with a lower optimizer.learningRate, or generate in"
                " float32",
            ) from error

    def _take(self, results: list[SequenceResult], schedule: FlushSchedule) -> None:
        for result in results:
            self._pending.append(self._rollout(result))
            self._finished += 1
            self._left_of_group[result.prompt] -= 1
            if self._left_of_group[result.prompt] == 0:
                schedule.group_completed()

    def _publish(self, *, partials: bool) -> None:
        unfinished = self._run.unfinished() if self._run and partials else []
        if self._conversations is not None and partials:
            unfinished += self._conversations.unfinished()
            self._conversations.storing()
        self._publisher.publish(self._pending, [self._rollout(result) for result in unfinished])
        self._pending = []

    def _rollout(self, result: SequenceResult) -> GeneratedSample:
        key, told = (result.prompt, result.index), self._conversations
        void = told is not None and key in told.restarted
        earlier = () if void else self._earlier_spans.get(key, ())
        return GeneratedSample(
            prompt=result.prompt,
            index=result.index,
            prompt_tokens=self._prompts[result.prompt].tokens,
            response_tokens=result.response_tokens,
            log_probs=result.log_probs,
            finish_reason=result.finish_reason,
            versions=continued_spans(earlier, self._request.weights.version, len(result.response_tokens)),
            given=told.given(key) if told is not None else [],
            outcome=told.outcome(key) if told is not None else None,
        )

    @property
    def _away(self) -> int:
        """Number of unfinished samples that are not in the run."""
        return self._conversations.away if self._conversations is not None else 0

    def _sampled(self, lengths: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return lengths of responses without given tokens."""
        told = self._conversations
        if told is None:
            return lengths
        return [
            (prompt, index, tokens - sum(end - start for start, end in told.given((prompt, index))))
            for prompt, index, tokens in lengths
        ]

    def _progress(self, run: EngineRun, settled: int | None) -> Progress:
        return Progress(
            prefetched_version=settled,
            finished=self._finished,
            running=run.running,
            waiting=run.waiting + self._away,
            tokens=run.computed.response,
            lengths=self._sampled(run.lengths()),
            decoding=run.decoding(),
        )


def _shared_prefixes(request: GenerationRequest) -> dict[int, SharedPrefix]:
    """Return the shared prefixes, by prompt."""
    given = request.shared_prefixes
    if given is None:
        return {}
    return {
        each.prompt: SharedPrefix(each.tokens, given.folder, each.source, given.wait_seconds) for each in given.prefixes
    }


def _task(
    request: GenerationRequest, prompt: Prompt, index: int, partial: GeneratedSample | None, prefix: SharedPrefix | None
) -> SequenceTask:
    return SequenceTask(
        prompt=prompt.row,
        index=index,
        prompt_tokens=prompt.tokens,
        seed=sample_seed(request.seed, request.purpose, request.key.step, prompt.row, index),
        response_tokens=partial.response_tokens if partial else (),
        log_probs=partial.log_probs if partial else (),
        prefix=prefix,
        step=request.key.step,
    )
