"""The preparation stage: converts datasets to prompts, and complete groups of samples to the learner's input.

A request holds a chunk of complete groups; a step has several while its tail still decodes. The result does not depend
on the chunks: each group is scored by its own calls, and the learner does the part that needs the whole batch
(whitening). Token ids come from the rollouts; text is decoded from them only for rewards.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Literal

from transformers import PreTrainedTokenizerBase

from rlhfless_functions.api import (
    ExampleSample,
    GroupResult,
    MaterializeRequest,
    MaterializeResult,
    PrepareRequest,
    PrepareResult,
    SampledTokens,
    WeightsReference,
)
from rlhfless_functions.data import rollouts
from rlhfless_functions.data.dataset_files import read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.draft_history import vocabulary_digest, write_draft_history
from rlhfless_functions.data.estimates import estimate_samples
from rlhfless_functions.data.left_out import check_left_out
from rlhfless_functions.data.prompts import Prompt, publish_prompts, read_prompts
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.data.traces import trace_rows, write_trace_rows
from rlhfless_functions.environments.making import episode_prompts
from rlhfless_functions.preparation.chunk_metrics import chunk_metrics
from rlhfless_functions.preparation.models import PreparationModels
from rlhfless_functions.preparation.passes import ForwardPasses
from rlhfless_functions.preparation.reward_groups import conversation, head, reward_group, with_episodes
from rlhfless_functions.rewards.groups import Progress, RewardGroup
from rlhfless_functions.rewards.scoring import RewardScorer, Scores
from rlhfless_functions.rewards.truth_check import unreadable_truths
from rlhfless_functions.runtime.device_memory import give_back
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import load_config, load_tokenizer, longest_sequence

_CHECKING_SECONDS = 60.0
"""Most time to read all ground truths before training: 20 thousand of them, unless they are plain numbers."""
_LONGEST_TEXT = 4000
"""Longest text for people, in characters."""


class Preparer:
    """One instance's preparation: its reward workers, models and tokenizer."""

    def __init__(self) -> None:
        self._scorer = RewardScorer()
        self._models = PreparationModels()
        self._tokenizer: tuple[ModelSettings, PreTrainedTokenizerBase] | None = None
        self._vocabulary = ""

    def preload(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Load tokenizer and model before the first request.

        Raises:
            TaskError: if they cannot be loaded.
        """
        self._tokenizer_of(model, weights)
        self._models.preload(model, weights)

    def run(
        self, request: MaterializeRequest | PrepareRequest, context: TaskContext
    ) -> MaterializeResult | PrepareResult:
        """Materialise a dataset, or prepare a chunk of groups.

        Raises:
            TaskError: the task failed. Only complete results are published. `reward_failed` names the reward.
        """
        # Score rewards from the first moment, while models are loaded again.
        context.awake()
        with store_errors():
            if isinstance(request, MaterializeRequest):
                return self._materialize(request)
            return self._prepare(request, context)

    def sleep(self) -> None:
        """Give the device's memory back: models and reward models are loaded again when needed. The reward workers
        stay, with the memory that a user's own code holds in them."""
        self._models.forget()
        self._scorer.forget_models()
        give_back()

    def _materialize(self, request: MaterializeRequest) -> MaterializeResult:
        model = request.model
        tokenizer = self._tokenizer_of(model, WeightsReference(version=0, uri=model.source))
        config = load_config(model.source, revision=model.revision).get_text_config()
        longest = longest_sequence(config)
        tables = read_tables(request.data)
        unreadable = partial(unreadable_truths, seconds=_CHECKING_SECONDS)
        episodes, notes = None, list[str]()
        if request.environment is not None:
            # A row with arguments of its own is checked with the rows.
            arguments = request.data.chat_template_kwargs
            episodes, notes = episode_prompts(request.environment, model, tokenizer, arguments)
        prompts, counts = make_prompts(
            tables, request.data, request.sampling, tokenizer, longest, request.rewards, unreadable, episodes
        )
        counts = counts.model_copy(update={"notes": [*counts.notes, *notes]})
        check_left_out(tables, counts, request.most_dropped)
        publish_prompts(request.sink, prompts, counts)
        return MaterializeResult(prompts=len(prompts), dropped=counts.left_out, uri=request.sink, counts=counts)

    def _prepare(self, request: PrepareRequest, context: TaskContext) -> PrepareResult:
        self._scorer.start(request.rewards)
        tokenizer = self._tokenizer_of(request.model, request.policy)
        groups = _groups(request, _read_samples(request))
        samples = [sample for group in groups for sample in group.samples]
        broken_off = False

        def stopped() -> bool:
            return broken_off or context.stop_reason is not None

        def score() -> tuple[Scores, float]:
            started = time.monotonic()
            batch = _reward_groups(groups, tokenizer)
            progress = Progress(**request.progress.model_dump())
            scores = self._scorer.score(request.rewards, batch, request.sampling, progress, stopped)
            return scores, time.monotonic() - started

        with ThreadPoolExecutor(1) as thread:
            scoring = thread.submit(score)
            started, loaded = time.monotonic(), self._models.load_seconds
            try:
                if request.purpose == "training":
                    self._ask_models(request, samples, tokenizer, scoring, stopped)
            except BaseException:
                broken_off = True
                raise
            seconds, loading = time.monotonic() - started, self._models.load_seconds - loaded
            scores, reward_seconds = scoring.result()
        results = [_finish(request, group, scores, number) for number, group in enumerate(groups)]
        rollouts.write_prepared(request.sink, samples)
        if request.trace is not None:
            write_trace_rows(request.trace, trace_rows(samples, request.visits, request.key.step))
        if request.drafts is not None:
            write_draft_history(request.drafts, samples, self._vocabulary)
        spent = {"seconds/rewards/sum": reward_seconds, "seconds/models/sum": seconds}
        prompt_lengths = [len(group.prompt.tokens) for group in groups]
        metrics = scores.metrics | chunk_metrics(prompt_lengths, samples, results) | spent
        if request.metrics_by_group:
            shares = {name: number / len(groups) for name, number in spent.items()}
            by_group = [
                of_rewards | chunk_metrics([len(group.prompt.tokens)], group.samples, [result]) | shares
                for of_rewards, group, result in zip(scores.group_metrics, groups, results, strict=True)
            ]
            results = [
                result.model_copy(update={"metrics": own}) for result, own in zip(results, by_group, strict=True)
            ]
        examples = _examples(request, groups, tokenizer)
        # Loading delays nothing that has to wait for rewards anyway.
        delay = max(seconds, reward_seconds) - max(seconds - loading, reward_seconds)
        return PrepareResult(part=request.sink, groups=results, examples=examples, metrics=metrics, load_seconds=delay)

    def _ask_models(
        self,
        request: PrepareRequest,
        samples: Sequence[PreparedSample],
        tokenizer: PreTrainedTokenizerBase,
        scoring: Future[tuple[Scores, float]],
        stopped: Callable[[], bool],
    ) -> None:
        """Fill in the numbers that policy, reference and critic give for the samples. Stop early if scoring has
        failed."""
        self._models.use(request.model)
        algorithm = request.algorithm.resolved()

        def check() -> None:
            if stopped():
                raise TaskError("drained", "the instance was told to stop while it prepared samples", retryable=True)
            if scoring.done() and (error := scoring.exception()) is not None:
                raise error

        passes = ForwardPasses(request, samples, tokenizer.pad_token_id or 0, self._models.device, check)
        if request.old_log_probs:
            _fill_in(samples, "old_log_probs", passes.log_probs(self._models.policy(request.policy)))
        if request.reference is not None and algorithm.kl is not None and algorithm.kl.coefficient > 0:
            with self._models.reference(request.reference) as reference:
                log_probs = passes.log_probs(reference)
            _fill_in(samples, "reference_log_probs", log_probs)
        if algorithm.advantage != "gae" or not request.advantages:
            return
        if request.critic is not None:
            _fill_in(samples, "values", passes.values(self._models.critic(request.critic)))
        else:
            # Before the first step the critic's head is zero.
            _fill_in(samples, "values", [[0.0] * len(sample.response_tokens) for sample in samples])

    def _tokenizer_of(self, model: ModelSettings, weights: WeightsReference) -> PreTrainedTokenizerBase:
        """Return the job's tokenizer: every weights version has the same."""
        if self._tokenizer is None or self._tokenizer[0] != model:
            self._tokenizer = model, load_tokenizer(model, weights)
            self._vocabulary = vocabulary_digest(self._tokenizer[1].get_vocab())
        return self._tokenizer[1]


@dataclass(frozen=True)
class _Group:
    prompt: Prompt
    samples: list[PreparedSample]


def _read_samples(request: PrepareRequest) -> list[PreparedSample]:
    """Read the request's samples, in its order.

    Raises:
        TaskError: artifact_missing, if one is missing or unfinished.
    """
    keys = [(task.prompt, task.index) for task in request.samples]
    found = rollouts.read_rollouts(request.rollouts, wanted=set(keys))
    for prompt, index in keys:
        rollout = found.get((prompt, index))
        if rollout is None or not rollout.finished:
            raise TaskError(
                "artifact_missing",
                f"sample {index} of prompt {prompt} is {'unfinished' if rollout else 'missing'} in the"
                f" {len(request.rollouts)} rollout parts of step {request.key.step}; generate it again",
                retryable=True,
            )
    return [PreparedSample(**vars(found[key])) for key in keys]


def _groups(request: PrepareRequest, samples: Sequence[PreparedSample]) -> list[_Group]:
    """Group samples by the row of their prompt, never by its text, which may be in the data twice."""
    by_row = {row: list(group) for row, group in groupby(samples, key=lambda sample: sample.prompt)}
    if sum(map(len, by_row.values())) != len(samples):
        raise TaskError("bad_request", "samples: samples of one prompt must be next to each other")
    try:
        prompts = read_prompts(request.prompts, rows=by_row)
    except IndexError as error:
        raise TaskError("bad_request", f"samples: {error}") from error
    return [_Group(prompt, by_row[prompt.row]) for prompt in prompts]


def _reward_groups(groups: Sequence[_Group], tokenizer: PreTrainedTokenizerBase) -> list[RewardGroup]:
    spoken = [sample.response_tokens[head(sample.given) :] for group in groups for sample in group.samples]
    texts = iter(tokenizer.batch_decode(spoken, skip_special_tokens=True))
    made = [
        reward_group(
            group.prompt,
            [next(texts) for _ in group.samples],
            [sample.response_tokens for sample in group.samples],
            [sample.finish_reason for sample in group.samples],
        )
        for group in groups
    ]
    return [
        with_episodes(each, group.samples, tokenizer) if any(sample.outcome for sample in group.samples) else each
        for each, group in zip(made, groups, strict=True)
    ]


def _fill_in(
    samples: Sequence[PreparedSample],
    name: Literal["old_log_probs", "reference_log_probs", "values"],
    numbers: Sequence[list[float]],
) -> None:
    """Set one of the samples' numbers per token."""
    for sample, its_numbers in zip(samples, numbers, strict=True):
        setattr(sample, name, its_numbers)


def _examples(
    request: PrepareRequest, groups: Sequence[_Group], tokenizer: PreTrainedTokenizerBase
) -> list[ExampleSample]:
    wanted = {(task.prompt, task.index) for task in request.examples}
    return [
        ExampleSample(
            row=sample.prompt,
            index=sample.index,
            prompt=_readable(group.prompt.text),
            response=_readable(str(tokenizer.decode(sample.response_tokens, skip_special_tokens=True))),
            messages=episode_messages(sample, tokenizer),
            reward=sample.reward,
            terms=sample.reward_terms,
            advantage=math.fsum(sample.advantages) / tokens if sample.advantages and tokens else None,
            tokens=tokens,
            finish_reason=sample.finish_reason,
            version=sample.versions[-1].version if sample.versions else 0,
        )
        for group in groups
        for sample in group.samples
        for tokens in (sample.sampled_tokens,)
        if sample.key in wanted
    ]


def episode_messages(sample: PreparedSample, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Return the response of an episode as messages; none without an environment."""
    if sample.outcome is None:
        return []
    begun = str(tokenizer.decode(sample.response_tokens[: head(sample.given)], skip_special_tokens=True))
    said = conversation(sample, tokenizer, whole=True)
    first = [{"role": "user", "content": begun}] if begun.strip() else []
    return [*first, *({**each, "content": _readable(each["content"])} for each in said)]


def _readable(text: str) -> str:
    """Return a text without the middle, if it is very long: the beginning and the end of a response matter most."""
    half = _LONGEST_TEXT // 2
    left_out = len(text) - 2 * half
    return text if left_out <= 0 else f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


def _finish(request: PrepareRequest, group: _Group, scores: Scores, number: int) -> GroupResult:
    """Fill in rewards, mask and advantages of the group with this number."""
    terms, rewards = {name: groups[number] for name, groups in scores.terms.items()}, scores.totals[number]
    scored = [reward for reward in rewards if reward is not None]
    mean = math.fsum(scored) / len(scored) if scored else None
    spread = _spread(request, terms, rewards)
    for position, sample in enumerate(group.samples):
        sample.reward = rewards[position]
        sample.reward_terms = {name: numbers[position] for name, numbers in terms.items()}
        sample.group_reward_mean, sample.group_reward_std = mean, spread if scored else None
        truncated = sample.finish_reason == "truncated" and request.algorithm.mask_truncated
        sample.mask = sample.reward is not None and not truncated
    if request.purpose == "training" and request.advantages:
        _advantages(request, group.samples)
    sampled: Counter[int] = Counter()
    for sample in group.samples:
        for span in sample.versions:
            sampled[span.version] += sample.sampled_between(span.start, span.end)
    return GroupResult(
        prompt=group.prompt.row,
        reward=mean,
        spread=spread,
        in_loss=any(sample.mask for sample in group.samples),
        sampled=[
            SampledTokens(version=version, tokens=tokens) for version, tokens in sorted(sampled.items()) if tokens
        ],
        switched_responses=sum(_policies(sample) > 1 for sample in group.samples),
    )


def _policies(sample: PreparedSample) -> int:
    """Return the number of weights versions that sampled a response."""
    return sum(sample.sampled_between(span.start, span.end) > 0 for span in sample.versions)


def _advantages(request: PrepareRequest, samples: Sequence[PreparedSample]) -> None:
    estimate = estimate_samples(samples, request.algorithm, request.rewards)
    for row, sample in enumerate(samples):
        tokens, returns = sample.sampled_tokens, estimate.returns
        sample.advantages = sample.of_response(estimate.advantages[row, :tokens].tolist())
        sample.returns = None if returns is None else sample.of_response(returns[row, :tokens].tolist())


def _spread(request: PrepareRequest, terms: dict[str, list[float | None]], rewards: list[float | None]) -> float:
    """Return the standard deviation of the rewards. If each is normalised by itself, return the largest of the weighted
    terms'."""
    scored = [position for position, reward in enumerate(rewards) if reward is not None]
    if request.algorithm.resolved().advantage_normalization != "group_per_reward":
        return _deviation([reward for reward in rewards if reward is not None])
    deviations = [
        abs(reward.weight) * _deviation([n for position in scored if (n := terms[reward.name][position]) is not None])
        for reward in request.rewards
    ]
    return max(deviations, default=0.0)


def _deviation(rewards: Sequence[float]) -> float:
    """Return the standard deviation of a sample (n − 1); exactly 0 if all are equal."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return 0.0
    mean = math.fsum(rewards) / len(rewards)
    return math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
