"""The work of one request: generates its share of the samples, publishes them, and reports on them."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    DecodeCounts,
    GenerationRequest,
    GenerationResult,
    Progress,
    SampleTask,
    WeightsFetched,
)
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import GeneratedSample, VersionSpan, continued_spans
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.generation.engines.base import (
    ComputedTokens,
    Engine,
    EngineRun,
    NonFiniteLogitsError,
    SequenceKey,
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
        self._prompts = dict(prompts)
        self._publisher = publisher
        self._clock = clock
        self._earlier_spans: dict[tuple[int, int], Sequence[VersionSpan]] = {}
        self._version = request.weights.version
        self._asked = self._finished = 0
        self._left_of_group: Counter[int] = Counter()
        self._open: set[SequenceKey] = set()
        """Unfinished samples."""
        self._schedule = FlushSchedule(0, request.flush_seconds, -math.inf)
        self.tasks = self.add(request.samples, {}, earlier)
        self._conversations: Conversations | None = None
        if episodes is not None:
            given = {key: rollout.given for key, rollout in earlier.partial.items()}
            away = [key for key, rollout in earlier.partial.items() if rollout.finish_reason == "turn"]
            longest = request.sampling.max_response_tokens
            self._conversations = Conversations(episodes, prompts, longest, given, away)
        self._pending: list[GeneratedSample] = []
        self.weights_seconds = 0.0
        self.weights_fetched = WeightsFetched()
        self._run: EngineRun | None = None
        self._all_wait_since: float | None = None
        """Time since when all samples wait for their environments."""
        self._let_go = False
        self._waited = 0.0
        """Seconds in which nothing was computed, because all samples were away."""

    def open(self, engine: Engine) -> EngineRun:
        """Give the share to an engine."""
        request = self._request
        self._run = engine.start(
            self.tasks, request.sampling, request.kv_budget_tokens, request.drafts, keep_kv_cache=request.keep_kv_cache
        )
        if self._conversations is not None:
            self._conversations.open(self._run)
        return self._run

    @property
    def unfinished(self) -> Collection[SequenceKey]:
        """Samples that are not finished."""
        return self._open

    def add(
        self, samples: Sequence[SampleTask], prompts: Mapping[int, Prompt], earlier: EarlierSamples
    ) -> list[SequenceTask]:
        """Add samples to the share, and return the tasks of those that earlier attempts have not finished.

        Args:
            prompts: prompts of these samples by row.
            earlier: all that earlier attempts left of these samples.
        """
        self._prompts |= prompts
        self._earlier_spans |= {key: rollout.versions for key, rollout in earlier.partial.items()}
        finished = {rollout.key for rollouts in earlier.finished.values() for rollout in rollouts}
        prefixes = _shared_prefixes(self._request)
        tasks = [
            _task(
                self._request,
                self._prompts[sample.prompt],
                sample.index,
                earlier.partial.get((sample.prompt, sample.index)),
                prefixes.get(sample.prompt),
            )
            for sample in samples
            if (sample.prompt, sample.index) not in finished
        ]
        self._asked += len(samples)
        self._finished += len(finished)
        self._left_of_group.update(task.prompt for task in tasks)
        self._open.update(task.key for task in tasks)
        self._schedule.grown(len(tasks))
        return tasks

    def goes_on_in(self, run: EngineRun, version: int, unfinished: Iterable[SequenceResult] = ()) -> None:
        """Go on in another run, with the weights of this version.

        Args:
            unfinished: samples as the run before has left them, of any share.
        """
        for result in unfinished:
            if result.key in self._open:
                key, length = (result.prompt, result.index), len(result.response_tokens)
                self._earlier_spans[key] = continued_spans(self._earlier_spans.get(key, ()), self._version, length)
        self._run, self._version = run, version

    def generate(self, run: EngineRun, prefetcher: WeightsPrefetcher) -> None:
        """Step until the share is done or the task is told to stop, and publish along the way."""
        # Measure from here: the time before says nothing about the instance's speed.
        told_once = {"room": run.room, "weights_bytes": fetched_bytes(self._request, self.weights_fetched)}
        settled = prefetcher.settled
        self._context.emit(self._progress(run, settled).model_copy(update=told_once))
        now = began = self._clock()
        told = now
        # This part has the samples of all sinks, for a later attempt.
        self.publish(now)
        first = True
        while (run.running or run.waiting or self._away) and self._context.stop_reason is None:
            if self._waits_too_long():
                self._let_go = True
                break
            before, computes = now, bool(run.running or run.waiting)
            self.take(self._step(run))
            now = self._clock()
            self._waited += 0.0 if computes else now - before
            if first:
                first = False
                seconds = {"weights_seconds": round(self.weights_seconds, 4), "pass_seconds": round(now - began, 4)}
                logger.info("first tokens sampled", extra={"fields": seconds})
            self.flush(now)
            if now - told >= self._request.progress_seconds or prefetcher.settled != settled:
                settled = prefetcher.settled
                self._context.emit(self._progress(run, settled))
                told = now
        self.publish(now)
        run.close()

    def flush(self, now: float) -> None:
        """Publish what is due."""
        self._publisher.check()
        due = self._schedule.due(now, len(self._pending))
        if self._conversations is not None and self._publisher.idle:
            assert self._run is not None
            self._conversations.go_on(self._run)
            due = "everything" if self._conversations.unstored else due
        if due != "nothing" and self._publisher.idle:
            self.publish(now, partials=due == "everything")

    def close(self) -> None:
        """Wait until everything is stored."""
        self._publisher.close()

    def result(self, *, alone: bool = True) -> GenerationResult:
        """Return the result of the share.

        Args:
            alone: whether its run had no other share. Then the run's counts are its own.
        """
        run = self._run if alone else None
        computed = run.computed if run else ComputedTokens()
        return GenerationResult(
            finished=self._finished,
            unfinished=self._asked - self._finished,
            waited_seconds=round(self._waited, 4),
            all_wait=self._let_go,
            parts=self._publisher.parts,
            prompt_tokens=computed.prompt,
            response_tokens=computed.response,
            weights_seconds=self.weights_seconds,
            weights_fetched=self.weights_fetched,
            shared_prefixes=run.prefix_traffic() if run else {},
            decoding=run.decoding() if run else DecodeCounts(),
        )

    def _step(self, run: EngineRun) -> list[SequenceResult]:
        try:
            results = run.step()
            return results if self._conversations is None else self._conversations.take(run, results)
        except TaskError:
            # The engine has failed, but its earlier samples are valid: publish them for the next attempt.
            self.publish(self._clock())
            raise
        except NonFiniteLogitsError as error:
            raise diverged(error, self._request.key.step, self._version) from error

    def take(self, results: Iterable[SequenceResult]) -> None:
        """Take in finished samples."""
        for result in results:
            self._open.discard(result.key)
            self._pending.append(self._rollout(result))
            self._finished += 1
            self._left_of_group[result.prompt] -= 1
            if self._left_of_group[result.prompt] == 0:
                self._schedule.group_completed()

    def publish(self, now: float, *, partials: bool = True) -> None:
        """Hand over what has finished, and the tokens so far of the rest."""
        found = self._run.unfinished() if self._run and partials else []
        unfinished = [each for each in found if each.key in self._open]
        if self._conversations is not None and partials:
            unfinished += self._conversations.unfinished()
            self._conversations.storing()
        self._publisher.publish(self._pending, [self._rollout(result) for result in unfinished])
        self._pending = []
        self._schedule.flushed(now)

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
            versions=continued_spans(earlier, self._version, len(result.response_tokens)),
            given=told.given(key) if told is not None else [],
            outcome=told.outcome(key) if told is not None else None,
        )

    def _waits_too_long(self) -> bool:
        """Return whether all samples have waited for longer than letting the instance go and having one again costs."""
        shelter, told = self._request.shelter, self._conversations
        if shelter is None or told is None or told.waiting < len(self._open):
            self._all_wait_since = None
            return False
        now = self._clock()
        if self._all_wait_since is None:
            self._all_wait_since = now
        return now - self._all_wait_since >= shelter.patience_seconds

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


def fetched_bytes(request: GenerationRequest, fetched: WeightsFetched) -> int | None:
    """Return the bytes of weights that were fetched from an object store; None if they are on a file system."""
    local = artifacts.local_path(request.weights.adapter or request.weights.uri) is not None
    return None if local else fetched.bytes


def diverged(error: NonFiniteLogitsError, step: int, version: int) -> TaskError:
    """Return the error of a task whose weights have no valid distribution."""
    return TaskError(
        "non_finite_sample",
        f"step {step}: weights version {version} gave NaN or infinite logits for prompt {error.prompt}, sample"
        f" {error.index}, response token {error.position}: the policy has diverged; return to an earlier version with"
        " a lower optimizer.learningRate, or generate in float32",
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
