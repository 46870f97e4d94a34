"""All rewards of a job: each scored in its own way, then weighted and summed."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhfless_functions import artifacts
from rlhfless_functions.rewards import remote
from rlhfless_functions.rewards.checks import WAIT_FACTOR
from rlhfless_functions.rewards.code.scoring import longest_call as longest_code_call
from rlhfless_functions.rewards.groups import START, Progress, RewardGroup
from rlhfless_functions.rewards.length import soft_overlong
from rlhfless_functions.rewards.pool import Outcome, RewardPool, RewardUnusableError, WorkerSettings
from rlhfless_functions.rewards.process import WorkerStopped
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import RewardSettings, SamplingSettings

if TYPE_CHECKING:
    from rlhfless_functions.rewards.model import RewardModel

_MOST_MATH_WORKERS = 8


@dataclass
class Scores:
    """The scores of groups, in their order."""

    terms: dict[str, list[list[float | None]]]
    """By reward, the values of each group's responses, before weighting; None if unscorable."""
    totals: list[list[float | None]]
    """Weighted sums of the terms that scored each group's responses; None if no term with a weight other than 0 did, or
    if such a term failed for the group."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Sums and counts by name; `preparation_metrics` lists them."""
    group_metrics: list[dict[str, float]] = field(default_factory=list)
    """The same for each group."""


class RewardScorer:
    """The rewards' worker processes and models, which are kept between calls."""

    def __init__(self) -> None:
        self._pools: dict[str, RewardPool] = {}
        self._models: dict[str, RewardModel] = {}

    def start(self, rewards: Sequence[RewardSettings]) -> None:
        """Start the workers in the background."""
        for reward in rewards:
            if reward.kind not in ("length", "model", "environment"):
                self._pool(reward).start()

    def score(
        self,
        rewards: Sequence[RewardSettings],
        groups: Sequence[RewardGroup],
        sampling: SamplingSettings,
        progress: Progress = START,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Scores:
        """Score groups with all rewards, concurrently.

        Args:
            rewards: rewards of the job.
            groups: the groups to score; each group is one call.
            sampling: sampling settings of the job, for length shaping.
            progress: position of the training.
            stopped: called several times a second; returns whether to stop.

        Raises:
            TaskError: reward_failed, if a reward can't be loaded, or fails and its `on_error` is `fail`;
                drained, if `stopped` returned True.
        """
        failed = False

        def score_one(reward: RewardSettings) -> list[Outcome]:
            nonlocal failed
            try:
                return self._score_one(reward, groups, sampling, progress, lambda: failed or stopped())
            except TaskError:
                # After one failure, the others need not continue.
                failed = True
                raise

        with ThreadPoolExecutor(max(1, len(rewards))) as threads:
            futures = [threads.submit(score_one, reward) for reward in rewards]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            # The others were stopped because of the first.
            raise min(errors, key=lambda error: isinstance(error, TaskError) and error.reason == "drained")
        outcomes = {reward.name: future.result() for reward, future in zip(rewards, futures, strict=True)}
        terms = {name: [outcome.scores for outcome in outcomes[name]] for name in outcomes}
        weights = {reward.name: reward.weight for reward in rewards}
        totals = [
            [
                weighted_sum({name: terms[name][number][response] for name in terms}, weights)
                for response in range(group.size)
            ]
            # A failed term did not abstain. A sum without it would be a different reward.
            if not any(outcomes[name][number].error and weights[name] != 0 for name in outcomes)
            else [None] * group.size
            for number, group in enumerate(groups)
        ]
        for group, total in zip(groups, totals, strict=True):
            for number, dropped in enumerate(group.dropped or ()):
                total[number] = None if dropped else total[number]
        by_group = [
            _metrics({name: [groups[number]] for name, groups in outcomes.items()}, [total])
            for number, total in enumerate(totals)
        ]
        return Scores(terms, totals, _metrics(outcomes, totals), by_group)

    def forget_models(self) -> None:
        """Unload all reward models; they are loaded again when needed. The workers stay."""
        for model in self._models.values():
            model.close()
        self._models.clear()

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self.forget_models()

    def _score_one(
        self,
        reward: RewardSettings,
        groups: Sequence[RewardGroup],
        sampling: SamplingSettings,
        progress: Progress,
        stopped: Callable[[], bool],
    ) -> list[Outcome]:
        try:
            outcomes = self._outcomes(reward, groups, sampling, progress, stopped)
        except RewardUnusableError as error:
            raise TaskError("reward_failed", f"reward {reward.name!r} {error}") from error
        except WorkerStopped:
            raise TaskError("drained", "the instance was told to stop while rewards ran", retryable=True) from None
        if reward.on_error == "fail":
            for group, outcome in zip(groups, outcomes, strict=True):
                # The others failed only because of it, and their errors do not tell the reason.
                if outcome.error is not None and outcome.called:
                    raise TaskError(
                        "reward_failed",
                        f"reward {reward.name!r} {outcome.error} (row {group.prompt} of the prompts);"
                        " correct it, or set its onError to unscorable to exclude such responses",
                    )
        return outcomes

    def _outcomes(
        self,
        reward: RewardSettings,
        groups: Sequence[RewardGroup],
        sampling: SamplingSettings,
        progress: Progress,
        stopped: Callable[[], bool],
    ) -> list[Outcome]:
        if reward.length is not None:
            longest, buffer = sampling.max_response_tokens, reward.length.buffer_tokens
            return [
                Outcome([soft_overlong(len(ids), longest, buffer) for ids in group.completion_ids]) for group in groups
            ]
        if reward.environment is not None:
            return [Outcome(group.episode_scores or [None] * group.size) for group in groups]
        if reward.model is not None:
            return self._model(reward.model.source).score(groups, stopped)
        return self._pool(reward).score(
            groups,
            progress=progress,
            seconds=lambda group: longest_call(reward, group),
            give_up=reward.on_error == "fail",
            stopped=stopped,
        )

    def _pool(self, reward: RewardSettings) -> RewardPool:
        key = reward.model_dump_json()
        if key not in self._pools:
            settings = WorkerSettings(reward.name, reward.kind, _setup(reward), reward.memory)
            cores = len(os.sched_getaffinity(0))
            self._pools[key] = RewardPool(settings, min(cores, _MOST_MATH_WORKERS) if reward.kind == "math" else 1)
        return self._pools[key]

    def _model(self, source: str) -> "RewardModel":
        if source not in self._models:
            # Imports torch and transformers, which the other rewards don't need.
            from rlhfless_functions.rewards.model import RewardModel

            self._models[source] = RewardModel(source)
        return self._models[source]


def weighted_sum(terms: dict[str, float | None], weights: dict[str, float]) -> float | None:
    """Return the weighted sum of the terms that scored a response, as in TRL; None if no term with a weight did.

    A term is None if it does not judge the response, such as a term for another task. Terms of weight 0 are only
    logged.
    """
    counted = {name: score for name, score in terms.items() if weights[name] != 0}
    scored = [weights[name] * score for name, score in counted.items() if score is not None]
    if not terms or (counted and not scored):
        return None
    return sum(scored, 0.0)


def longest_call(reward: RewardSettings, group: RewardGroup) -> float:
    """Return the time limit of a group's call in seconds: `timeout` plus the sum of the kind's inner time limits."""
    if reward.code is not None:
        inner = longest_code_call(group.columns, reward.code.tests_column, reward.code.timeout, group.size)
        return reward.timeout + inner
    if reward.http is not None:
        return remote.longest_call(reward.timeout)
    for settings in (reward.exact_match, reward.math, reward.format):
        if settings is not None:
            return reward.timeout + WAIT_FACTOR * settings.timeout * group.size
    return reward.timeout


def _setup(reward: RewardSettings) -> dict[str, Any]:
    """Return the arguments of a worker's scorer."""
    if reward.python is not None:
        path = artifacts.local_path(reward.python.file)
        if path is not None:
            return {**reward.python.model_dump(), "file": str(path), "text": None}
        try:
            text = artifacts.read_bytes(reward.python.file).decode()
        except artifacts.ArtifactMissingError as error:
            raise RewardUnusableError(f"has no file: {error}") from error
        return {**reward.python.model_dump(), "text": text}
    if reward.http is not None:
        return {"url": reward.http.url, "attempt_seconds": reward.timeout}
    if reward.code is not None:
        return {"tests_column": reward.code.tests_column, "seconds": reward.code.timeout, "memory": reward.memory}
    for settings in (reward.exact_match, reward.math, reward.format):
        if settings is not None:
            return {**settings.model_dump(), "timeout": settings.timeout}
    return {}


def _metrics(outcomes: dict[str, list[Outcome]], totals: list[list[float | None]]) -> dict[str, float]:
    metrics: dict[str, float] = {}

    def add(name: str, numbers: Sequence[float]) -> None:
        metrics[f"{name}/sum"] = metrics.get(f"{name}/sum", 0.0) + sum(numbers)
        metrics[f"{name}/count"] = metrics.get(f"{name}/count", 0.0) + len(numbers)

    scored = [total for group in totals for total in group if total is not None]
    add("reward", scored)
    metrics["reward/square/sum"] = sum(total * total for total in scored)
    metrics["reward/unscorable/count"] = sum(len(group) for group in totals) - len(scored)
    for name, groups in outcomes.items():
        add(f"reward/{name}", [score for outcome in groups for score in outcome.scores if score is not None])
        metrics[f"reward/{name}/unscorable/count"] = sum(outcome.scores.count(None) for outcome in groups)
        metrics[f"reward/{name}/errors/count"] = sum(outcome.error is not None for outcome in groups)
        for outcome in groups:
            for logged, value in outcome.metrics:
                add(f"reward/{name}/{logged}", [value])
    return metrics
