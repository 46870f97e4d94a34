"""Weighted rewards, each of exactly one kind."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from rlhfless_functions.settings.base import Bytes, Duration, Settings


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"{pattern!r:.80} is not a regular expression ({error}); correct it, in single quotes, in which YAML keeps"
            " backslashes"
        ) from error
    return pattern


RegularExpression = Annotated[str, Field(max_length=1000), AfterValidator(_compiles)]
"""A regular expression of Python's `re`."""


class PythonReward(Settings):
    """A Python function of yours."""

    file: str = Field(min_length=1)
    """Path (relative to the job file) or fsspec URI of the Python file."""
    function: str | None = Field(default=None, min_length=1)
    """Name of the function in that file; by default `reward`, or else the only one with the signature of a reward."""
    style: Literal["trl", "verl", "openrlhf"] | None = None
    """Form of the function, sync or async; by default its signature tells. `trl`: fn(prompts, completions,
    completion_ids, **columns) → list. `verl`: compute_score(data_source, solution_str, ground_truth, extra_info) →
    number or dict with `score`, or its batch form. `openrlhf`: reward_func(queries, prompts, labels) → list, or dict
    with `rewards`."""


class HttpReward(Settings):
    """A reward server in OpenRLHF's form: POST {query, prompts, labels}, answered by {rewards}."""

    url: str = Field(pattern=r"^https?://")
    """Address of the reward server."""


class ModelReward(Settings):
    """A Hugging Face sequence-classification model with one label, whose logit is the reward."""

    source: str = Field(min_length=1)
    """Folder (relative to the job file), fsspec URI or hub name of the model with its tokenizer."""


class ExactMatchReward(Settings):
    """1 if the answer equals `ground_truth`, else 0. Each element of a list is right, and each answer of a dict."""

    pattern: RegularExpression | None = None
    """Regular expression. The first group of its last match after the thoughts (`<think>…</think>`) is the answer; by
    default the whole stripped response after the thoughts is."""
    require_end: bool = False
    """Score 0 where the response did not end by itself (it was truncated)."""
    timeout: Duration = 1.0
    """Most CPU time to search one response; above it the response scores 0 and is counted."""


class MathReward(Settings):
    """1 if the response's answer equals `ground_truth` (math-verify), else 0. The answer is the last box or `<answer>`
    tag after the thoughts; without one, what follows `####` or "the answer is", or the last mathematics. Each element
    of a list is right."""

    require_end: bool = False
    """Score 0 where the response did not end by itself (it was truncated)."""
    timeout: Duration = 5.0
    """Most CPU time to verify one response; above it the response scores 0 and is counted."""


class FormatReward(Settings):
    """1 if the whole response matches a regular expression, else 0."""

    pattern: RegularExpression = Field(min_length=1)
    """Regular expression that the whole response must match; `.` matches newlines too. If the prompt ends with
    `<think>`, the tag counts as the response's beginning."""
    timeout: Duration = 1.0
    """Most CPU time to match one response; above it the response scores 0 and is counted."""


class LengthReward(Settings):
    """DAPO's soft over-long punishment: 0 up to the buffer, then linearly down to −1 at the longest response."""

    buffer_tokens: int = Field(ge=1)
    """Width of the slope before `sampling.maxResponseTokens` (overlong_buffer.len)."""


class CodeReward(Settings):
    """Share of the unit tests that the response's last Python code block passes, run in a sandboxed subprocess."""

    tests_column: str | None = Field(default=None, min_length=1)
    """Column with the tests, nested ones with dots: Python tests (asserts, pytest, unittest, HumanEval's check), or
    inputs and outputs of programs or functions, in any of the public formats. By default, the first of `tests`, `test`,
    `test_list`, `test_cases`, `unit_tests`, `input_output`, `verification_info`, `private_test_cases`,
    `public_test_cases`, `private_tests`, `public_tests` and `reward_model.ground_truth` that a row has."""
    timeout: Duration = 10.0
    """Most time of one test: on the clock while it waits, CPU time while it computes; a test that exceeds it fails."""


class EnvironmentReward(Settings):
    """The score that the job's environment gives an episode."""


RewardKind = Literal["python", "http", "model", "exact_match", "math", "format", "length", "code", "environment"]


class RewardSettings(Settings):
    """One reward term. Exactly one of its kinds is set."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9_-]*[a-z0-9])?$", max_length=63)
    """Name in metrics and reports."""
    weight: float = 1.0
    """Factor of this term in the sum."""
    timeout: Duration = 60.0
    """Time limit of one call (a group). A call that exceeds it fails, and its worker is killed."""
    memory: Bytes = 4 * 2**30
    """Memory limit of a reward worker."""
    on_error: Literal["fail", "unscorable"] = "fail"
    """What a call that raises, hangs, exits or returns a wrong value does: end the job, or leave its samples without
    any reward, even if other rewards scored them. Such samples are counted."""
    python: PythonReward | None = None
    """A function of the user's own."""
    http: HttpReward | None = None
    """A reward server."""
    model: ModelReward | None = None
    """A reward model."""
    exact_match: ExactMatchReward | None = None
    """Equality with the ground truth."""
    math: MathReward | None = None
    """Mathematical equality with the ground truth."""
    format: FormatReward | None = None
    """A regular expression."""
    length: LengthReward | None = None
    """Soft over-long punishment."""
    code: CodeReward | None = None
    """Unit tests."""
    environment: EnvironmentReward | None = None
    """The score of the job's environment."""

    @property
    def kind(self) -> RewardKind:
        """The kind that is set."""
        return next(kind for kind in RewardKind.__args__ if getattr(self, kind) is not None)  # type: ignore[attr-defined]

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [kind for kind in RewardKind.__args__ if getattr(self, kind) is not None]  # type: ignore[attr-defined]
        if len(kinds) != 1:
            given = " and ".join(kinds) if kinds else "none"
            raise ValueError(
                f"reward {self.name!r} needs exactly one of python, http, model, exactMatch, math, format, length,"
                f" code and environment; it has {given}"
            )
        return self
