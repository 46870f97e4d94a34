"""The latency of a job's own instances, learnt from their events.

A regression fits a few numbers to the work of actors: steps, sequence-steps, context and prompt tokens against seconds.
The table is the prior. Huber's weights give outliers (a slow disk, a throttled GPU, a neighbour) little influence. The
fit is used only while it has forecast better than the prior.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from typing import Any, Self

import numpy as np

from rlhfless_operator.planner.latency.linear import LinearLatency, non_negative_least_squares

WINDOW = 256
"""Number of observations that are kept."""
_PRIOR_WEIGHT = 0.3
"""Strength of the prior: a doubled parameter counts like an observation with this relative error."""
_HUBER = 1.5
"""Residuals beyond this many deviations count linearly."""
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Observation:
    """A stretch of one actor's work."""

    steps: float
    """Number of decode steps. For a whole share without drafts, about the tokens of its longest response."""
    sequence_steps: float
    """Sum of the sequences in each step: the response tokens generated, without drafts."""
    context_tokens: float
    """Sum of these sequences' contexts in each step."""
    prefill_tokens: float
    """Prompt tokens computed."""
    seconds: float
    """Time that it took."""
    drafted_rows: float = 0.0
    """Drafted tokens that its decode steps tried, each in a row of its own."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"seconds is {self.seconds}: a stretch of work takes more than 0 seconds")

    @property
    def features(self) -> tuple[float, ...]:
        """Regressors of the seconds, in the order of the latency's parameters."""
        return self.steps, self.sequence_steps, self.context_tokens, self.prefill_tokens, self.drafted_rows

    def forecast(self, latency: LinearLatency) -> float:
        """Return the seconds that it should take by `latency`."""
        return (
            latency.step_seconds * self.steps
            + latency.sequence_seconds * self.sequence_steps
            + latency.context_seconds * self.context_tokens
            + latency.prefill_token_seconds * self.prefill_tokens
            + latency.draft_seconds * self.drafted_rows
        )


class Calibration:
    """A latency learnt from observations.

    Args:
        prior: latency to start from: a table's or the roofline's.
    """

    def __init__(self, prior: LinearLatency) -> None:
        self.prior = prior
        self._fitted = prior
        self._observations: deque[Observation] = deque(maxlen=WINDOW)
        self._prior_errors: deque[float] = deque(maxlen=WINDOW // 4)
        self._fitted_errors: deque[float] = deque(maxlen=WINDOW // 4)

    @property
    def latency(self) -> LinearLatency:
        """The best forecaster so far: the fit, or the prior while the fit has not been better."""
        if len(self._prior_errors) < 3:
            return self.prior
        better = statistics.median(self._fitted_errors) < statistics.median(self._prior_errors)
        return self._fitted if better else self.prior

    @property
    def prior_factor(self) -> float | None:
        """Median ratio of the seconds that work took to those by the prior; None before any work."""
        ratios = [each.seconds / each.forecast(self.prior) for each in self._observations]
        return statistics.median(ratios) if ratios else None

    def observe(self, *observations: Observation) -> None:
        """Learn from stretches of work in their order, after both candidates have forecast each.

        A fit takes milliseconds, and a step has up to a thousand stretches. So it is fitted after the first, the
        second, the fourth and so on, and after the last.
        """
        for number, observation in enumerate(observations, start=1):
            for errors, candidate in ((self._prior_errors, self.prior), (self._fitted_errors, self._fitted)):
                errors.append(abs(observation.forecast(candidate) / observation.seconds - 1))
            self._observations.append(observation)
            if number.bit_count() == 1 or number == len(observations):
                self._fitted = self._fit()

    def state(self) -> dict[str, Any]:
        """Return everything that `from_state` needs, as JSON values."""
        return {
            "prior": asdict(self.prior),
            "observations": [list(asdict(each).values()) for each in self._observations],
            "prior_errors": list(self._prior_errors),
            "fitted_errors": list(self._fitted_errors),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """Return the calibration with this `state`."""
        calibration = cls(LinearLatency(**state["prior"]))
        calibration._observations.extend(Observation(*values) for values in state["observations"])
        calibration._prior_errors.extend(state["prior_errors"])
        calibration._fitted_errors.extend(state["fitted_errors"])
        if calibration._observations:
            calibration._fitted = calibration._fit()
        return calibration

    def _fit(self) -> LinearLatency:
        """Fit by iteratively reweighted least squares on relative errors, each parameter in units of its prior."""
        scale = np.array(astuple(self.prior))
        known = scale > 0
        rows = np.array([(*each.features, each.seconds) for each in self._observations])
        matrix = (rows[:, :5] * scale / rows[:, 5:])[:, known]
        anchor = np.eye(int(known.sum())) * _PRIOR_WEIGHT
        # Start where half of the observations may be wrong: all parameters scaled by the median ratio.
        ratio = 1 / float(np.median(np.maximum(matrix.sum(axis=1), 1e-12)))
        solution = np.full(anchor.shape[0], ratio)
        for _ in range(_ROUNDS):
            residual = matrix @ solution - 1
            deviation = max(1.4826 * float(np.median(np.abs(residual))), 1e-4)
            weight = np.sqrt(np.minimum(1.0, _HUBER * deviation / np.maximum(np.abs(residual), 1e-12)))
            solution = np.array(
                non_negative_least_squares(
                    np.vstack([matrix * weight[:, None], anchor * deviation]),
                    np.concatenate([weight, np.full(len(anchor), ratio * _PRIOR_WEIGHT * deviation)]),
                )
            )
        found = np.zeros(5)
        found[known] = solution * scale[known]
        if not found[:3].any():
            # Stretches that contradict each other are told best by their prompts alone, as if decoding took no time.
            found = scale * ratio
        return LinearLatency(*found.tolist())
