"""What `rlhfless try-reward` asks of a process of the functions, and what comes back. It is no stage's request."""

from typing import Any

from pydantic import Field

from rlhfless_functions.api.messages import FinishReason, Message
from rlhfless_functions.settings import DataSettings, EngineSampling, ModelSettings, RewardSettings


class GivenResponse(Message):
    """A response that somebody has written down."""

    place: str
    """Where: file and line, for messages."""
    response: str
    row: int | None = Field(default=None, ge=0)
    """Row of its prompt in the data, as training reads it."""
    prompt: str | list[dict[str, Any]] | None = None
    """Its prompt, as in the data or as a model sees it; with neither this nor `row` it is the data's next one."""
    columns: dict[str, Any] = Field(default={})
    """What rewards are given besides, where the data has no such prompt."""
    finish_reason: FinishReason = "stop"


class RewardTrial(Message):
    """Score responses, given or sampled, and train nothing."""

    model: ModelSettings
    data: DataSettings
    rewards: list[RewardSettings]
    sampling: EngineSampling
    seed: int
    responses: list[GivenResponse] = Field(default=[])
    """What to score; if there are none, responses are sampled from the model."""
    prompts: int = Field(default=1, ge=1)
    """How many of the data's first prompts are answered."""
    samples: int = Field(default=1, ge=1)
    """Responses to each."""


class TriedResponse(Message):
    """A response and what it scored."""

    row: int | None
    """Row of its prompt in the data; None where the data has no such prompt."""
    prompt: str
    """As the model sees it."""
    response: str
    tokens: int
    finish_reason: FinishReason
    terms: dict[str, float | None]
    """Each reward's own number, before weighting; None where it gave none. One that failed is not there."""
    reward: float | None
    """As training would see it."""


class TriedReward(Message):
    """How one reward did."""

    name: str
    kind: str
    weight: float
    calls: int
    """Calls that were made: one for each prompt, up to the first that failed."""
    first_seconds: float
    """Of the first call, loading included."""
    mean_seconds: float | None = None
    """Of the others, if there were any."""
    error: str | None = None
    """Why it failed."""


class RewardTrialResult(Message):
    """What came of it."""

    responses: list[TriedResponse] = Field(default=[])
    rewards: list[TriedReward] = Field(default=[])
    error: str | None = None
    """Why nothing could be scored at all."""
