"""The request and the result of `rlhfless try-reward`. It belongs to no stage."""

from typing import Any

from pydantic import Field

from rlhfless_functions.api.messages import FinishReason, Message
from rlhfless_functions.settings import DataSettings, EngineSampling, ModelSettings, RewardSettings


class GivenResponse(Message):
    """A response from the user."""

    place: str
    """File and line, for messages."""
    response: str
    row: int | None = Field(default=None, ge=0)
    """Row of its prompt in the data, as training reads it."""
    prompt: str | list[dict[str, Any]] | None = None
    """Its prompt, as in the data or as a model sees it. Without this and `row`, it belongs to the data's next
    prompt."""
    columns: dict[str, Any] = Field(default={})
    """Further columns for rewards, if the data has no such prompt."""
    finish_reason: FinishReason = "stop"


class RewardTrial(Message):
    """Score given or sampled responses, without training."""

    model: ModelSettings
    data: DataSettings
    rewards: list[RewardSettings]
    sampling: EngineSampling
    seed: int
    total_steps: int = Field(default=1, ge=1)
    """Steps of the job, which rewards may read; 1 if they depend on the data."""
    responses: list[GivenResponse] = Field(default=[])
    """Responses to score; if there are none, the model samples some."""
    prompts: int = Field(default=1, ge=1)
    """Number of the data's first prompts to answer."""
    samples: int = Field(default=1, ge=1)
    """Responses to each prompt."""


class TriedResponse(Message):
    """A response and its scores."""

    row: int | None
    """Row of its prompt in the data; None if the data has no such prompt."""
    prompt: str
    """The prompt as the model sees it."""
    response: str
    tokens: int
    finish_reason: FinishReason
    terms: dict[str, float | None]
    """Each reward's value, before weighting; None if it gave none. Rewards that failed are missing."""
    reward: float | None
    """The reward as training would see it."""


class TriedReward(Message):
    """The result of one reward."""

    name: str
    kind: str
    weight: float
    calls: int
    """Number of calls: one for each prompt, up to the first failure."""
    first_seconds: float
    """Seconds of the first call, including loading."""
    mean_seconds: float | None = None
    """Seconds of the other calls, if there were any."""
    error: str | None = None
    """Reason why the reward failed."""


class RewardTrialResult(Message):
    """The result of a trial."""

    responses: list[TriedResponse] = Field(default=[])
    rewards: list[TriedReward] = Field(default=[])
    error: str | None = None
    """Reason why nothing could be scored."""
