"""The generation stage: samples the responses of a share at one weights version, and publishes them as they finish.

A response that older weights began keeps their tokens and log-probabilities. The rest is sampled with the request's
weights, which compute the keys and values of all tokens before it anew. If the request says so, the engine keeps those
of the older weights instead, as far as it has them.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    DecodeCounts,
    GenerationRequest,
    GenerationResult,
    NextWeights,
    Progress,
    Samples,
    WeightsFetched,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, read_prompts
from rlhfless_functions.data.rollouts import Rollout, continued_spans
from rlhfless_functions.generation.engines.base import (
    Engine,
    EngineRun,
    NonFiniteLogitsError,
    SequenceResult,
    SequenceTask,
    SharedPrefix,
)
from rlhfless_functions.generation.engines.choice import EngineChoice, choose_engine, make_engine
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.prefetching import WeightsPrefetcher
from rlhfless_functions.generation.publishing import FlushSchedule, RolloutPublisher, announced
from rlhfless_functions.generation.resumption import EarlierSamples, find_earlier, rollout_parts
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import EngineSettings, ModelSettings

logger = logging.getLogger(__name__)


class Generator:
    """Generation's code with the caches of one instance.

    Args:
        engine: the engine; by default the one of the settings.
        clock: monotonic seconds.
        settings: of the engine, until a request brings others.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        clock: Callable[[], float] = time.monotonic,
        settings: EngineSettings | None = None,
    ) -> None:
        self._given = engine
        self._clock = clock
        self._settings = settings or EngineSettings()
        self._made: tuple[EngineChoice, EngineSettings, Engine] | None = None
        self._told = artifacts.fetched()
        """What requests have told of. An instance of generation fetches nothing but weights."""
        self._loaded = False
        """Whether an engine has had weights: it takes only the first ones as they come."""
        self._prefetcher = WeightsPrefetcher()
        self._relayed: WeightsReference | None = None
        """The version that this instance has passed on last."""

    @property
    def engine(self) -> str | None:
        """What generates here and why; None until that has been chosen."""
        return str(self._made[0]) if self._made else None

    def preload(
        self, model: ModelSettings, weights: WeightsReference, sources: artifacts.Sources | None = None
    ) -> None:
        """Load weights before the first request.

        Args:
            model: the model.
            weights: its weights.
            sources: other instances to fetch them from.

        Raises:
            TaskError: if they cannot be had.
        """
        self._load(self._engine(self._settings, model), model, weights, sources)

    def run(self, request: GenerationRequest, context: TaskContext) -> GenerationResult:
        """Generate a share, or as much of it as there is time for.

        Samples that an earlier attempt finished are announced again and not generated; partial ones are continued.
        When the task is told to stop, everything sampled so far is published, and the result counts what is left.

        Raises:
            TaskError: for a share, prompts or weights that cannot be had, and for a model that has diverged.
        """
        with store_errors():
            prompts = _prompts(request)
            parts = rollout_parts(request.sink)
            wanted = {(sample.prompt, sample.index) for sample in request.samples}
            places = [*request.resume_from, request.sink]
            earlier = find_earlier(places, wanted, _versions(request), request.known_until)
            for part, rollouts in earlier.finished.items():
                context.emit(Samples(samples=announced(rollouts), part=part))
            with RolloutPublisher(request.sink, parts, context.emit) as publisher:
                share = _Share(request, context, prompts, earlier, publisher, self._clock)
                if share.tasks and context.stop_reason is None:
                    engine = self._engine(request.engine, request.model)
                    asked = self._clock()
                    sources = _sources(request.weights_from, request.weights_line, context)
                    prefetched = self._load(engine, request.model, request.weights, sources)
                    run = share.open(engine)
                    run.await_weights()
                    share.weights_seconds = self._clock() - asked
                    share.weights_fetched = self._fetched(prefetched)
                    self._watch(engine, request, context)
                    try:
                        share.generate(run, self._prefetcher)
                    finally:
                        self._prefetcher.pause()
                        if context.stop_reason == "drain":
                            self._prefetcher.stop()
        return share.result()

    def sleep(self) -> None:
        """Give the device's memory back; what generates stays chosen.

        Raises:
            TaskError: `engine_lost`, where that takes the end of the process.
        """
        self._prefetcher.stop()
        engine = self._given or (self._made[2] if self._made else None)
        if engine is not None:
            engine.sleep()

    def _load(
        self, engine: Engine, model: ModelSettings, weights: WeightsReference, sources: artifacts.Sources | None
    ) -> bool:
        """Returns whether the weights had been prefetched."""
        prefetched = self._prefetcher.take(weights)
        self._relay(weights, sources)
        engine.load(model, weights, prefetched)
        self._loaded = True
        return prefetched is not None

    def _watch(self, engine: Engine, request: GenerationRequest, context: TaskContext) -> None:
        """Prefetch newer weights while this request decodes."""

        def fetch(upcoming: NextWeights) -> object:
            with store_errors():
                self._relay(upcoming.weights, _sources(upcoming.weights_from, upcoming.weights_line, context))
            return engine.prefetch(request.model, upcoming.weights)

        self._prefetcher.watch(request.weights.version, request.next_weights, fetch)

    def _relay(self, weights: WeightsReference, sources: artifacts.Sources | None) -> None:
        """Fetch weights from other instances, and pass them on, unless they are an adapter or in a file system of this
        machine."""
        travels = weights.adapter is None and artifacts.local_path(weights.uri) is None
        if sources is not None and travels and self._relayed != weights:
            # The engine finds the copy, and never asks where it is from.
            arriving = artifacts.arrive(weights.uri, sources=sources)
            if self._loaded:
                arriving.result()
            self._relayed = weights

    def _fetched(self, prefetched: bool) -> WeightsFetched:
        """What was fetched since the last request."""
        before, now = self._told, artifacts.fetched()
        self._told = now
        return WeightsFetched(
            bytes=now.bytes - before.bytes,
            deltas=now.deltas - before.deltas,
            refused_deltas=now.refused_deltas - before.refused_deltas,
            relayed_bytes=now.relayed_bytes - before.relayed_bytes,
            refused_sources=now.refused_sources - before.refused_sources,
            prefetched=int(prefetched),
        )

    def _engine(self, settings: EngineSettings, model: ModelSettings) -> Engine:
        """The present engine, if it is the wanted one."""
        if self._given is not None:
            return self._given
        choice = choose_engine(settings, model)
        if self._made is None or self._made[:2] != (choice, settings):
            logger.info("generation engine chosen", extra={"fields": {"engine": choice.name, "reason": choice.reason}})
            self._made = (choice, settings, make_engine(choice, settings))
        return self._made[2]


class _Share:
    """The progress of one request: its finished and pending samples, and the times of its reports."""

    def __init__(
        self,
        request: GenerationRequest,
        context: TaskContext,
        prompts: dict[int, Prompt],
        earlier: EarlierSamples,
        publisher: RolloutPublisher,
        clock: Callable[[], float],
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
        self._finished = len(finished)
        self._left_of_group = Counter(task.prompt for task in self.tasks)
        self._pending: list[Rollout] = []
        self.weights_seconds = 0.0
        self.weights_fetched = WeightsFetched()
        self._run: EngineRun | None = None

    def open(self, engine: Engine) -> EngineRun:
        """Give the share to an engine."""
        request = self._request
        self._run = engine.start(
            self.tasks,
            request.sampling,
            request.kv_budget_tokens,
            request.drafts,
            keep_kv_cache=request.keep_kv_cache,
        )
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
        # Samples gathered from many sinks are now in one, for a later attempt.
        self._publish(partials=True)
        first = True
        while (run.running or run.waiting) and self._context.stop_reason is None:
            self._take(self._step(run), schedule)
            now = self._clock()
            if first:
                first = False
                seconds = {"weights_seconds": round(self.weights_seconds, 4), "pass_seconds": round(now - began, 4)}
                logger.info("first tokens sampled", extra={"fields": seconds})
            self._publisher.check()
            due = schedule.due(now, len(self._pending))
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
        """What became of the share."""
        return GenerationResult(
            finished=self._finished,
            unfinished=len(self._request.samples) - self._finished,
            parts=self._publisher.parts,
            prompt_tokens=self._run.prompt_tokens if self._run else 0,
            response_tokens=self._run.response_tokens if self._run else 0,
            weights_seconds=self.weights_seconds,
            weights_fetched=self.weights_fetched,
            shared_prefixes=self._run.prefix_traffic() if self._run else {},
            decoding=self._run.decoding() if self._run else DecodeCounts(),
        )

    def _step(self, run: EngineRun) -> list[SequenceResult]:
        try:
            return run.step()
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
        self._publisher.publish(self._pending, [self._rollout(result) for result in unfinished])
        self._pending = []

    def _rollout(self, result: SequenceResult) -> Rollout:
        earlier = self._earlier_spans.get((result.prompt, result.index), ())
        return Rollout(
            prompt=result.prompt,
            index=result.index,
            prompt_tokens=self._prompts[result.prompt].tokens,
            response_tokens=result.response_tokens,
            log_probs=result.log_probs,
            finish_reason=result.finish_reason,
            versions=continued_spans(earlier, self._request.weights.version, len(result.response_tokens)),
        )

    def _progress(self, run: EngineRun, settled: int | None) -> Progress:
        return Progress(
            prefetched_version=settled,
            finished=self._finished,
            running=run.running,
            waiting=run.waiting,
            tokens=run.response_tokens,
            lengths=run.lengths(),
            decoding=run.decoding(),
        )


def _versions(request: GenerationRequest) -> range:
    """The weights versions whose tokens are kept."""
    newest = request.weights.version
    return range(newest if request.oldest_version is None else request.oldest_version, newest + 1)


def _sources(chain: Sequence[str] | None, line: str | None, context: TaskContext) -> artifacts.Sources | None:
    """Where to fetch weights from; None if that is the store alone."""
    return artifacts.Sources.of_chain(chain, context.address, context.token, line) if chain is not None else None


def _shared_prefixes(request: GenerationRequest) -> dict[int, SharedPrefix]:
    """By prompt."""
    given = request.shared_prefixes
    if given is None:
        return {}
    return {
        each.prompt: SharedPrefix(each.tokens, given.folder, each.source, given.wait_seconds) for each in given.prefixes
    }


def _task(
    request: GenerationRequest,
    prompt: Prompt,
    index: int,
    partial: Rollout | None,
    prefix: SharedPrefix | None,
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


def _prompts(request: GenerationRequest) -> dict[int, Prompt]:
    """The share's prompts by row, checked."""
    most_common = Counter((sample.prompt, sample.index) for sample in request.samples).most_common(1)[0]
    if most_common[1] > 1:
        prompt, index = most_common[0]
        raise TaskError(
            "bad_request", f"samples: sample {index} of prompt {prompt} is requested {most_common[1]} times"
        )
    try:
        read = read_prompts(request.prompts, sorted({sample.prompt for sample in request.samples}))
    except IndexError as error:
        raise TaskError("bad_request", f"samples: {error}") from error
    longest = request.sampling.max_prompt_tokens
    for prompt_read in read:
        if len(prompt_read.tokens) > longest:
            raise TaskError(
                "data_invalid",
                f"prompt {prompt_read.row} has {len(prompt_read.tokens)} tokens, more than sampling.maxPromptTokens"
                f" ({longest}); raise the limit, or materialise the data again, which drops it",
            )
    return {prompt_read.row: prompt_read for prompt_read in read}
