"""The three functions on an emulated GPU: they take the time of the work, and train nothing. Without torch.

Generation is the real stage with an engine that follows a trace. Preparation and learning wait and answer. Rollouts,
and data that fit the trace, are written; weights, checkpoints and models are not.
"""

import time
from collections.abc import Sequence
from functools import cached_property

from rlhfless_functions.api import (
    DataCounts,
    ExportRequest,
    ExportResult,
    GroupResult,
    LearnRequest,
    LearnResult,
    MaterializeRequest,
    MaterializeResult,
    PrepareRequest,
    PrepareResult,
    SampleTask,
    SaveRequest,
    SaveResult,
    Stage,
    TakeUpRequest,
    TakeUpResult,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, publish_prompts
from rlhfless_functions.data.traces import TraceLengths
from rlhfless_functions.data.turns import TracedResponse
from rlhfless_functions.environments.emulated import EmulatedEpisodeMaker, read_lengths
from rlhfless_functions.generation.engines.emulated import EmulatedEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.learning.pieces import FollowedJournal, LetGoError
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.serving.function import Function
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.settings.emulation import EmulationSettings

_LOOK_SECONDS = 0.05


def emulated_function(stage: Stage, emulation: EmulationSettings, listens_at: float) -> Function:
    """Return a stage's code on an emulated GPU.

    Args:
        listens_at: time when the instance has started, in monotonic seconds.
    """
    if stage == "generation":
        return Generator(EmulatedEngine(emulation, listens_at), episodes_of=EmulatedEpisodeMaker(emulation))
    return EmulatedPreparer(emulation) if stage == "preparation" else EmulatedLearner(emulation)


class _Emulated:
    def __init__(self, emulation: EmulationSettings) -> None:
        self._emulation = emulation

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Load nothing."""

    def sleep(self) -> None:
        """Release nothing, in no time."""

    @cached_property
    def _trace(self) -> TraceLengths:
        return read_lengths(self._emulation)

    def _tokens(self, step: int, samples: Sequence[SampleTask], longest: int) -> int:
        """Return the tokens of samples, with their prompts and what environments gave."""
        prompts, responses = self._trace.prompt_tokens, self._responses(step, samples)
        return sum(
            prompts[each.prompt] + min(longest, response.sampled + response.given)
            for each, response in zip(samples, responses, strict=True)
        )

    def _responses(self, step: int, samples: Sequence[SampleTask]) -> list[TracedResponse]:
        """Return what the trace has of samples, without what environments gave if none are emulated."""
        found = [self._trace.response(step, each.prompt, each.index) for each in samples]
        return found if self._emulation.acts else [TracedResponse(each.sampled) for each in found]

    def _take(self, seconds: float, context: TaskContext) -> None:
        """Let emulated seconds of work pass.

        Raises:
            TaskError: `drained`, if the task is told to stop.
        """
        context.awake()
        self._wait(seconds, context)

    def _wait(self, seconds: float, context: TaskContext) -> None:
        until = time.monotonic() + seconds * self._emulation.time_scale
        while (left := until - time.monotonic()) > 0:
            if context.stop_reason is not None:
                raise TaskError("drained", "the instance was told to stop while it worked", retryable=True)
            time.sleep(min(left, _LOOK_SECONDS))


class EmulatedPreparer(_Emulated):
    """Preparation: data that fits the trace, and groups without rewards. A sleep forgets the models."""

    def __init__(self, emulation: EmulationSettings) -> None:
        super().__init__(emulation)
        self._loaded = False

    def sleep(self) -> None:
        """Forget the models, which are read again for the next task."""
        self._loaded = False

    def run(
        self, request: MaterializeRequest | PrepareRequest, context: TaskContext
    ) -> MaterializeResult | PrepareResult:
        """Create data, or take the time of preparing a chunk."""
        if isinstance(request, MaterializeRequest):
            return self._materialize(request)
        tokens = self._tokens(request.key.step, request.samples, request.sampling.max_response_tokens)
        loading = 0.0
        if not self._loaded:
            begun = time.monotonic()
            self._wait(self._emulation.preparation_load_seconds, context)
            self._loaded, loading = True, time.monotonic() - begun
        self._take(tokens * self._emulation.preparation_token_seconds, context)
        # Every group counts as one to learn from, so dynamic sampling draws no other.
        prompts = dict.fromkeys(sample.prompt for sample in request.samples)
        groups = [GroupResult(prompt=prompt, reward=None, spread=1.0) for prompt in prompts]
        if not self._emulation.acts:
            return PrepareResult(part=request.sink, groups=groups, metrics={}, load_seconds=loading)
        if request.metrics_by_group:
            own = {prompt: [each for each in request.samples if each.prompt == prompt] for prompt in prompts}
            groups = [
                group.model_copy(update={"metrics": self._episode_metrics(request.key.step, own[group.prompt])})
                for group in groups
            ]
        metrics = self._episode_metrics(request.key.step, request.samples)
        return PrepareResult(part=request.sink, groups=groups, metrics=metrics, load_seconds=loading)

    def _episode_metrics(self, step: int, samples: Sequence[SampleTask]) -> dict[str, float]:
        """Return the sums and counts from which the job learns how its samples act; see `chunk_metrics`."""
        responses = self._responses(step, samples)
        sums = {
            "lengths": sum(each.sampled for each in responses),
            "environment/turns": sum(each.turns for each in responses),
            "environment/given": sum(each.given for each in responses),
            "environment/seconds_away": sum(each.away_seconds for each in responses) * self._emulation.time_scale,
        }
        return {f"{name}/sum": float(value) for name, value in sums.items()} | {
            f"{name}/count": float(len(responses)) for name in sums
        }

    def _materialize(self, request: MaterializeRequest) -> MaterializeResult:
        lengths = self._trace.prompt_tokens
        if max(lengths) > request.sampling.max_prompt_tokens:
            raise TaskError(
                "data_invalid",
                f"the trace has a prompt of {max(lengths)} tokens, more than sampling.maxPromptTokens"
                f" ({request.sampling.max_prompt_tokens}); raise it to {max(lengths)}",
            )
        prompts = [Prompt(row, [row % 97 + 2] * max(1, tokens), "") for row, tokens in enumerate(lengths)]
        counts = DataCounts(rows=len(prompts))
        with store_errors():
            publish_prompts(request.sink, prompts, counts)
        return MaterializeResult(prompts=len(prompts), dropped=0, uri=request.sink, counts=counts)


class EmulatedLearner(_Emulated):
    """Learning: names of weights that are never made. Its state moves to the host's memory and back."""

    def __init__(self, emulation: EmulationSettings) -> None:
        super().__init__(emulation)
        self._begun: tuple[str, int, int] | None = None
        """The interrupted step, and the number of its finished pieces and samples."""
        self._version: int | None = None
        """The version of the weights in memory."""

    def sleep(self) -> None:
        """Take the time of moving the state to the host's memory."""
        time.sleep(self._emulation.learning_move_seconds * self._emulation.time_scale)

    def run(
        self, request: LearnRequest | TakeUpRequest | SaveRequest | ExportRequest, context: TaskContext
    ) -> LearnResult | TakeUpResult | SaveResult | ExportResult:
        """Take the time of a training step, or of reading or writing the state."""
        if isinstance(request, ExportRequest):
            return ExportResult(uri=request.destination)
        emulation, waited, begun = self._emulation, 0.0, time.monotonic()
        if isinstance(request, SaveRequest):
            if self._version != request.version:
                raise TaskError("bad_request", f"version: this learner does not hold version {request.version}")
            self._take(emulation.learning_store_seconds, context)
            return SaveResult(checkpoint=request.checkpoint, seconds=time.monotonic() - begun)
        if context.asleep:
            self._wait(emulation.learning_move_seconds, context)
        context.awake()
        if isinstance(request, TakeUpRequest):
            taken = self._take_up(request.step, context)
            self._version = request.step.base.version
            return TakeUpResult(
                load_seconds=taken.get("seconds/load", 0.0), replay_seconds=taken.get("seconds/replay", 0.0)
            )
        seconds = self._take_up(request, context)
        training = time.monotonic()
        if request.following is None:
            tokens = self._learn(request, request.batch.samples, context)
        else:
            tokens, waited = self._follow(request, request.following, context)
        trained = time.monotonic() - training - waited
        self._take(emulation.update_seconds, context)
        if request.save_checkpoint is not None:
            self._take(emulation.learning_store_seconds, context)
        critic, step = request.publish_critic, request.batch.step
        self._version = step
        seconds |= {"seconds/train": trained, "seconds": time.monotonic() - begun}
        metrics = {**seconds, "tokens": float(tokens)}
        return LearnResult(
            weights=WeightsReference(version=step, uri=request.publish),
            critic=WeightsReference(version=step, uri=critic) if critic else None,
            checkpoint=request.save_checkpoint,
            metrics=metrics | ({} if request.following is None else {"seconds/wait": waited}),
        )

    def _take_up(self, request: LearnRequest, context: TaskContext) -> dict[str, float]:
        """Load the state that the step starts from and repeat the steps since, unless it is in memory; return the
        seconds of both."""
        held, self._version = self._version, None
        if held == request.base.version:
            return {}
        begun, emulation = time.monotonic(), self._emulation
        fresh = request.checkpoint is None
        self._take(emulation.learning_load_seconds if fresh else emulation.learning_store_seconds, context)
        loaded = time.monotonic()
        for earlier in request.replay:
            longest = request.sampling.max_response_tokens
            tokens = self._tokens(earlier.step, earlier.samples, longest)
            self._take(tokens * emulation.learning_token_seconds, context)
        return {"seconds/load": loaded - begun, "seconds/replay": time.monotonic() - loaded}

    def _learn(self, request: LearnRequest, samples: Sequence[SampleTask], context: TaskContext) -> int:
        tokens = self._tokens(request.batch.step, samples, request.sampling.max_response_tokens)
        self._take(tokens * self._emulation.learning_token_seconds, context)
        return tokens

    def _follow(self, request: LearnRequest, folder: str, context: TaskContext) -> tuple[int, float]:
        """Learn from each piece of the journal. Return their tokens, and the seconds without a piece."""
        journal = FollowedJournal(request.batch, folder, context, waits=request.waits)
        begun, self._begun = self._begun, None
        pieces, samples = begun[1:] if begun is not None and begun[0] == folder else (0, 0)
        tokens = 0
        try:
            for piece in journal.pieces(pieces, samples):
                tokens += self._learn(request, piece.samples, context)
                pieces, samples = pieces + 1, samples + len(piece.samples)
        except LetGoError:
            self._begun, self._version = (folder, pieces, samples), request.base.version
            raise
        return tokens, journal.waited_seconds
