"""A share of a batch: the samples of one sink, and when they are published."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    GenerationRequest,
    GenerationResult,
    NextWeights,
    SampleTask,
    WeightsFetched,
)
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.data.rollouts import GeneratedSample, VersionSpan, continued_spans
from rlhfless_functions.environments.episodes import Episodes
from rlhfless_functions.generation.engines.base import (
    EngineRun,
    NonFiniteLogitsError,
    SequenceKey,
    SequenceResult,
    SequenceTask,
    SharedPrefix,
)
from rlhfless_functions.generation.engines.seeds import sample_seed
from rlhfless_functions.generation.resumption import EarlierSamples
from rlhfless_functions.generation.rollout_files import FlushSchedule, RolloutPublisher
from rlhfless_functions.generation.turns.conversations import Conversations
from rlhfless_functions.runtime.task import TaskError


class Share:
    """The progress of one share: its finished and pending samples, and the times at which they are published.

    Args:
        request: names its samples, its sink and its model.
        prompts: prompts of the samples by row.
        earlier: what earlier attempts left of the samples.
        publisher: writes the parts.
        clock: monotonic seconds.
        episodes: environments of the samples; None if a response is a single turn.
    """

    def __init__(
        self,
        request: GenerationRequest,
        prompts: dict[int, Prompt],
        earlier: EarlierSamples,
        publisher: RolloutPublisher,
        clock: Callable[[], float],
        episodes: Episodes | None = None,
    ) -> None:
        self._request = request
        self._prompts = dict(prompts)
        self._publisher = publisher
        self._clock = clock
        self._earlier: Mapping[tuple[int, int], GeneratedSample] = {}
        """The unfinished samples that earlier attempts left of those added last."""
        self._earlier_spans: dict[tuple[int, int], Sequence[VersionSpan]] = {}
        self._version = request.weights.version
        self._asked = 0
        self.finished = 0
        """Number of its samples that are finished."""
        self._left_of_group: Counter[int] = Counter()
        self._open: set[SequenceKey] = set()
        """Unfinished samples."""
        self._schedule = FlushSchedule(0, request.flush_seconds, -math.inf)
        self._conversations: Conversations | None = None
        if episodes is not None:
            self._conversations = Conversations(episodes, self._prompts, request.sampling.max_response_tokens)
        self.tasks = self.add(request.samples, {}, earlier)
        self._pending: list[GeneratedSample] = []
        self._run: EngineRun | None = None
        self._all_wait_since: float | None = None
        """Time since when all samples wait for their environments."""

    @property
    def acts(self) -> bool:
        """Whether its samples talk to environments."""
        return self._conversations is not None

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
        self._earlier = earlier.partial
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
        self.finished += len(finished)
        self._left_of_group.update(task.prompt for task in tasks)
        self._open.update(task.key for task in tasks)
        self._schedule.grown(len(tasks))
        return tasks

    def begins(self, run: EngineRun, version: int, tasks: Sequence[SequenceTask]) -> None:
        """Let samples that wait in a run begin there, with the weights of this version."""
        self._run, self._version = run, version
        if self._conversations is not None:
            self._conversations.begin(run, tasks, self._earlier)

    def goes_on_in(self, run: EngineRun | None, version: int, unfinished: Iterable[SequenceResult]) -> None:
        """Go on in another run, with the weights of this version.

        Args:
            unfinished: samples as the run before has left them, of any share.
        """
        told = self._conversations
        for result in unfinished:
            if result.key in self._open:
                key, length = (result.prompt, result.index), len(result.response_tokens)
                void = told is not None and key in told.restarted
                earlier = () if void else self._earlier_spans.get(key, ())
                self._earlier_spans[key] = continued_spans(earlier, self._version, length)
                if told is not None:
                    told.restarted.discard(key)
        self._run, self._version = run, version
        if told is not None and run is not None:
            told.move(run)

    def flush(self, now: float) -> None:
        """Publish what is due."""
        self._publisher.check()
        due = self._schedule.due(now, len(self._pending))
        if due == "nothing" and self._pending and not self._open:
            # The driver waits for the last sample, and for nothing else.
            due = "finished"
        if self._conversations is not None and self._run is not None and self._publisher.idle:
            self._conversations.go_on(self._run)
            due = "everything" if self._conversations.unstored else due
        if due != "nothing" and self._publisher.idle:
            self.publish(now, partials=due == "everything")

    def close(self) -> None:
        """Wait until everything is stored."""
        self._publisher.close()

    def result(self) -> GenerationResult:
        """Return the result of the share. The counts of its run are those of the whole batch."""
        unfinished, parts = self._asked - self.finished, self._publisher.parts
        return GenerationResult(
            finished=self.finished, unfinished=unfinished, parts=parts, prompt_tokens=0, response_tokens=0
        )

    def take(self, results: list[SequenceResult], *, among: int = 1) -> list[SequenceKey]:
        """Take in samples that have left the run, and answers of environments; return the samples that are finished.

        Args:
            among: number of shares that divide the wait for answers while nothing is left to compute.
        """
        if self._conversations is not None:
            assert self._run is not None
            results = self._conversations.take(self._run, results, among)
        for result in results:
            self._open.discard(result.key)
            self._pending.append(self._rollout(result))
            self.finished += 1
            self._left_of_group[result.prompt] -= 1
            if self._left_of_group[result.prompt] == 0:
                self._schedule.group_completed()
        return [result.key for result in results]

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

    def waits_too_long(self) -> bool:
        """Return whether all samples have waited for longer than letting the instance go and having one again costs."""
        shelter, told = self._request.shelter, self._conversations
        if shelter is None or told is None or not self._open or told.waiting < len(self._open):
            self._all_wait_since = None
            return False
        now = self._clock()
        if self._all_wait_since is None:
            self._all_wait_since = now
        return now - self._all_wait_since >= shelter.patience_seconds

    def away_samples(self) -> list[SequenceResult]:
        """Return the unfinished samples with response tokens that are not in the run."""
        return self._conversations.unfinished() if self._conversations is not None else []

    @property
    def away(self) -> int:
        """Number of unfinished samples that are not in the run."""
        return self._conversations.away if self._conversations is not None else 0

    def given_tokens(self, prompt: int, index: int) -> int:
        """Return the number of tokens of a response that nobody sampled."""
        told = self._conversations
        return sum(end - start for start, end in told.given((prompt, index))) if told is not None else 0


def present_weights(request: GenerationRequest) -> NextWeights:
    """Return the weights that a request begins with, and the places that they are fetched from."""
    return NextWeights(weights=request.weights, weights_from=request.weights_from, weights_line=request.weights_line)


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
