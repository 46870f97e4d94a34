"""Predictions of response lengths: a moving average of each prompt's past lengths, and a learnt prior for new prompts.

RLHFless (arXiv 2602.22718, section 4.2) predicts a response's length by the exponentially weighted moving average of
its prompt's earlier responses. Here the average starts from the first visit and carries a spread beside the mean. A
prompt that was never seen gets the distribution of all responses that finished lately, this step included, shifted by
what its length says (`prompt_trend`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.prompt_trend import PromptTrend

_RUNAWAY_PRIOR_VISITS = 2.0
"""Visits of a prompt that the share of runaways among all responses weighs as much as, in the prompt's own share."""


@dataclass(frozen=True, slots=True)
class LengthEstimate:
    """An estimate of the lengths of a prompt's next responses, in tokens."""

    mean: float
    """Expected length."""
    spread: float
    """Standard deviation between responses."""
    seen: int
    """Visits of the prompt that the estimate rests on; 0 for a prompt never seen: its estimate is the prior."""
    runaways: float = 0.0
    """Share of responses that do not end by themselves; `mean` and `spread` are of the others."""

    def quantiles(self, count: int) -> list[float]:
        """Return the lengths of a typical group of `count` responses, longest first.

        They are the quantiles (i − ½)/count of a lognormal.
        A group's longest response holds its instance, so a plan made of means alone expects too little.
        """
        if self.spread <= 0 or self.mean <= 0:
            return [self.mean] * count
        variance = math.log1p((self.spread / self.mean) ** 2)
        location, scale = math.log(self.mean) - variance / 2, math.sqrt(variance)
        return [math.exp(location + scale * deviate) for deviate in _deviates(count)]

    def group(self, count: int, longest: int) -> list[float]:
        """Return the expected lengths of a group of `count` responses, longest first, truncated at `longest`."""
        runaways = round(count * self.runaways)
        ended = [min(float(longest), length) for length in self.quantiles(count - runaways)]
        return [float(longest)] * runaways + ended

    def outlook(self, tokens: int, longest: int) -> tuple[float, float]:
        """Return the tokens still to come of a response that has `tokens` so far, and the chance that it is a runaway.

        The first is the conditional mean of the lognormal, mixed with that chance: a runaway stops at `longest`. The
        chance rises with every token.
        """
        survival, rest = self._survival(tokens)
        endless, most = self._endless(survival), longest - tokens
        if most <= 0:
            return 0.0, endless
        natural = min(max(rest, 1.0), most)
        return min(most, natural + endless * (most - natural)), endless

    def _endless(self, survival: float) -> float:
        return self.runaways / (self.runaways + (1 - self.runaways) * survival) if self.runaways > 0 else 0.0

    def _survival(self, tokens: int) -> tuple[float, float]:
        """Return the chance that a response which ends by itself gets to `tokens`, and the mean still to come then."""
        spread = max(self.spread, 0.05 * self.mean, 1.0)
        mean = max(self.mean, 1.0)
        if tokens == 0:
            return 1.0, mean
        variance = math.log1p((spread / mean) ** 2)
        location, scale = math.log(mean) - variance / 2, math.sqrt(variance)
        deviate = (math.log(tokens) - location) / scale
        survival = _upper_tail(deviate)
        # Far in the tail both probabilities vanish; there it decays like an exponential of this mean.
        if survival < 1e-12:
            return survival, tokens * scale / deviate
        return survival, mean * _upper_tail(deviate - scale) / survival - tokens


@dataclass(frozen=True)
class PredictionReport:
    """Quality of one step's predictions."""

    prompts: int
    """Prompts compared."""
    seen: int
    """Number of these prompts that had been visited before."""
    rank_correlation: float | None
    """Spearman's ρ between predicted and actual lengths of all samples; None if either does not vary."""
    prompt_rank_correlation: float | None
    """The same between the predicted and the actual means of prompts."""
    relative_error: float | None
    """Mean of |predicted − actual| / actual over samples."""
    bias: float | None
    """Sum of the predicted lengths over the sum of the actual ones, minus 1: positive if predictions are too long."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step, without those that are None."""
        numbers = {
            "seen_share": self.seen / self.prompts if self.prompts else None,
            "rank_correlation": self.rank_correlation,
            "prompt_rank_correlation": self.prompt_rank_correlation,
            "relative_error": self.relative_error,
            "bias": self.bias,
        }
        return {f"prediction/{name}": value for name, value in numbers.items() if value is not None}


class LengthPredictor:
    """Per-prompt moving averages of response lengths.

    Args:
        weight: share of the newest visit in a prompt's average, in (0, 1].
        default_tokens: mean for a new prompt while no response has finished.
        half_life: number of finished responses after which an observation counts half in the prior.
        longest: length at which responses are truncated. Those that reach it are runaways and are counted apart.
    """

    def __init__(
        self,
        *,
        weight: float = 0.5,
        default_tokens: float = 256.0,
        half_life: float = 4096.0,
        longest: int | None = None,
    ) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight is {weight}: the newest visit's share is above 0 and at most 1")
        if default_tokens <= 0:
            raise ValueError(f"default_tokens is {default_tokens}: give a positive number of tokens")
        if half_life <= 0:
            raise ValueError(f"half_life is {half_life}: give a positive number of responses")
        self.weight = weight
        self.default_tokens = default_tokens
        self.half_life = half_life
        self.longest = longest
        self._prompts: dict[int, tuple[float, float, int, float]] = {}
        self._responses = 0.0
        self._mass = 0.0
        self._sum = 0.0
        self._squares = 0.0
        self._trend = PromptTrend()

    def observe(self, prompt: int, lengths: Sequence[int], prompt_tokens: int = 0) -> None:
        """Learn from one visit of a prompt: the lengths of all of its group's responses.

        Feed complete groups: the first responses to finish are the short ones.

        Args:
            prompt_tokens: length of the prompt; 0 if it is not known.

        Raises:
            ValueError: for a negative length.
        """
        if not lengths:
            return
        values = np.asarray(lengths, dtype=np.float64)
        if values.min() < 0:
            raise ValueError(f"lengths of prompt {prompt} contain {int(values.min())}: a response has 0 tokens or more")
        ended = values[values < self.longest] if self.longest is not None else values
        runaways = 1 - len(ended) / len(values)
        old = self._prompts.get(prompt)
        share = self.weight if old is not None else 1.0
        mean, variance, visits, rate = old or (self.prior().mean, self.prior().spread ** 2, 0, runaways)
        if len(ended):
            moved = float(ended.mean()) - mean
            # West's incremental form: the shift of the mean between visits is part of the uncertainty.
            variance = (1 - share) * (variance + share * moved * moved) + share * float(ended.var())
            mean += share * moved
        self._prompts[prompt] = (mean, variance, visits + 1, rate + share * (runaways - rate))
        fade = 0.5 ** (len(values) / self.half_life)
        if len(ended):
            self._trend.observe(prompt_tokens, float(ended.mean()), fade)
        self._responses = self._responses * fade + len(values)
        self._mass = self._mass * fade + len(ended)
        self._sum = self._sum * fade + float(ended.sum())
        self._squares = self._squares * fade + float((ended * ended).sum())

    def predict(self, prompt: int, prompt_tokens: int = 0) -> LengthEstimate:
        """Return the estimate for a prompt's next visit: the prior, with `seen` 0, for a prompt never seen."""
        known = self._prompts.get(prompt)
        if known is None:
            return self.prior(prompt_tokens)
        mean, variance, visits, rate = known
        # A few responses say little about a rare event, so the prior's share counts beside the prompt's own.
        own = visits / (visits + _RUNAWAY_PRIOR_VISITS)
        return LengthEstimate(mean, math.sqrt(variance), visits, own * rate + (1 - own) * self._runaways())

    def predict_other(self, prompt: int, prompt_tokens: int) -> LengthEstimate:
        """Return the estimate for a row of another dataset than the one that was observed."""
        mean = self.prior(prompt_tokens).mean
        return LengthEstimate(mean, mean / 2, 0)

    def prior(self, prompt_tokens: int = 0) -> LengthEstimate:
        """Return the estimate for a prompt never seen: by the responses that finished lately, or the default.

        Args:
            prompt_tokens: length of the prompt; 0 for the estimate over all prompts.
        """
        if self._mass <= 0:
            return LengthEstimate(self.default_tokens, self.default_tokens / 2, 0, self._runaways())
        mean = self._sum / self._mass
        spread = math.sqrt(max(0.0, self._squares / self._mass - mean * mean))
        factor = self._trend.factor(prompt_tokens)
        if factor == 1.0 or mean <= 0:
            return LengthEstimate(mean, spread, 0, self._runaways())
        # What the prompt's length explains is no longer uncertain.
        variance = max(0.0, math.log1p((spread / mean) ** 2) - self._trend.variance)
        mean = factor * mean if self.longest is None else min(factor * mean, float(self.longest))
        return LengthEstimate(mean, mean * math.sqrt(math.expm1(variance)), 0, self._runaways())

    def _runaways(self) -> float:
        return max(0.0, 1 - self._mass / self._responses) if self._responses else 0.0

    def state(self) -> dict[str, Any]:
        """Return everything that `from_state` needs, as JSON values; part of a checkpoint."""
        return {
            "weight": self.weight,
            "default_tokens": self.default_tokens,
            "half_life": self.half_life,
            "longest": self.longest,
            "prior": [self._responses, self._mass, self._sum, self._squares],
            "trend": self._trend.state(),
            "prompts": [[prompt, *known] for prompt, known in sorted(self._prompts.items())],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the predictor with this `state`: it predicts the same from here on."""
        predictor = cls(
            weight=state["weight"],
            default_tokens=state["default_tokens"],
            half_life=state["half_life"],
            longest=state["longest"],
        )
        predictor._responses, predictor._mass, predictor._sum, predictor._squares = state["prior"]
        predictor._trend = PromptTrend.from_state(state["trend"])
        predictor._prompts = {
            int(prompt): (float(mean), float(variance), int(visits), float(rate))
            for prompt, mean, variance, visits, rate in state["prompts"]
        }
        return predictor


def assess(estimates: Mapping[int, LengthEstimate], outcomes: Mapping[int, Sequence[int]]) -> PredictionReport:
    """Compare the predictions with which a step was planned with the lengths of its groups.

    Args:
        estimates: by prompt; those without an outcome are left out.
        outcomes: lengths of each prompt's responses.
    """
    prompts = [prompt for prompt in estimates if outcomes.get(prompt)]
    counts = [len(outcomes[prompt]) for prompt in prompts]
    means = np.array([estimates[prompt].mean for prompt in prompts], dtype=np.float64)
    predicted = np.repeat(means, counts)
    actual = np.array([length for prompt in prompts for length in outcomes[prompt]], dtype=np.float64)
    actual_means = np.array([float(np.mean(outcomes[prompt])) for prompt in prompts], dtype=np.float64)
    positive = actual > 0
    return PredictionReport(
        prompts=len(prompts),
        seen=sum(estimates[prompt].seen > 0 for prompt in prompts),
        rank_correlation=rank_correlation(predicted, actual),
        prompt_rank_correlation=rank_correlation(means, actual_means),
        relative_error=(
            float(np.mean(np.abs(predicted - actual)[positive] / actual[positive])) if positive.any() else None
        ),
        bias=float(predicted.sum() / actual.sum() - 1) if positive.any() else None,
    )


def rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float | None:
    """Return Spearman's ρ of two equally long series; ties share their mean rank. None if either does not vary."""
    if len(first) < 2:
        return None
    ranks = [_ranks(first), _ranks(second)]
    centred = [series - series.mean() for series in ranks]
    norms = [float(np.sqrt((series * series).sum())) for series in centred]
    if min(norms) == 0:
        return None
    return max(-1.0, min(1.0, float((centred[0] * centred[1]).sum()) / (norms[0] * norms[1])))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: NDArray[np.float64] = ends - (counts - 1) / 2.0
    return means[inverse]


def _upper_tail(deviate: float) -> float:
    return 0.5 * math.erfc(deviate / math.sqrt(2))


@cache
def _deviates(count: int) -> list[float]:
    normal = NormalDist()
    return [normal.inv_cdf((count - i - 0.5) / count) for i in range(count)]
