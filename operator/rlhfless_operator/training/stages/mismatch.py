"""The limit on the disagreement of engine and learner. Past it a job would train on what nobody has sampled."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlhfless_operator.records.mismatch import describe, mismatch_of
from rlhfless_operator.training.requests.tasks import StageFailedError

if TYPE_CHECKING:
    from rlhfless_operator.job.spec import RLHFJobSpec

_EXPLAINED = {"float32": 1.01, "bfloat16": 1.05, "quantized": 1.2}
"""Mean exp|difference| of log-probabilities that a number format explains. The first two are what the tests allow
between the engines and the learner; docs/correctness.md has what was measured."""
_LIMIT = {"float32": 1.2, "bfloat16": 2.0, "quantized": 5.0}
"""Mean exp|difference| that no rounding in a format explains."""


class MismatchError(StageFailedError):
    """Engine and learner differ by more than `limits.mismatch` allows."""


def explained_by_formats(spec: "RLHFJobSpec") -> float | None:
    """Return the mean exp|difference| that a job's number formats explain; None with dropout, which has no bound."""
    return None if _drops(spec) else _EXPLAINED[_format(spec)]


def check_mismatch(spec: "RLHFJobSpec", step: int, metrics: Mapping[str, float]) -> None:
    """Return if engine and learner agree well enough on a step's tokens.

    Args:
        spec: of the job.
        step: its number.
        metrics: of the step's rollout and learning.

    Raises:
        MismatchError: they do not; the message says what to do.
    """
    limit = spec.limits.mismatch
    if limit is None:
        limit = None if _drops(spec) else _LIMIT[_format(spec)]
    found = mismatch_of(metrics)
    if found is None or limit is None or found <= limit:
        return
    raise MismatchError(
        f"step {step}: {describe(found, _EXPLAINED[_format(spec)])}. That is more than limits.mismatch, {limit:g}: one"
        " of the two does not compute what the model defines. Use another generation.engine, or model.dtype: float32"
        f" without quantization; to train nevertheless, raise limits.mismatch above {found:.4g}. The weights of step"
        f" {step - 1} are intact"
    )


def _format(spec: "RLHFJobSpec") -> str:
    """Return the coarsest number format in which a job computes log-probabilities."""
    vllm = spec.generation.vllm
    if spec.generation.engine != "transformers" and (vllm.quantization or vllm.kv_cache_dtype.startswith("fp8")):
        return "quantized"
    return "bfloat16" if spec.model.dtype == "bfloat16" or spec.learning.autocast else "float32"


def _drops(spec: "RLHFJobSpec") -> bool:
    return spec.model.lora is not None and spec.model.lora.dropout > 0
