"""The request and the result of `rlhfless try-environment`. It belongs to no stage."""

from typing import Any

from pydantic import Field

from rlhfless_functions.api.messages import FinishReason, Message
from rlhfless_functions.settings import DataSettings, EngineSampling, EnvironmentSettings, ModelSettings, RewardSettings


class EpisodeTrial(Message):
    """Play episodes with the untrained model."""

    model: ModelSettings
    data: DataSettings
    environment: EnvironmentSettings
    rewards: list[RewardSettings]
    sampling: EngineSampling
    seed: int
    total_steps: int = Field(default=1, ge=1)
    """Steps of the job, which rewards may read; 1 if they depend on the data."""
    prompts: int = Field(default=1, ge=1)
    """Number of the data's first prompts to play."""
    samples: int = Field(default=1, ge=1)
    """Episodes of each prompt."""


class TriedEpisode(Message):
    """An episode, and what it scored."""

    row: int
    """Row of its prompt in the data."""
    prompt: str
    """The prompt as the model sees it, with the environment's text."""
    messages: list[dict[str, str]]
    """The model's turns (`assistant`), and what came between them (`tool`): `role` and `content`, with the template's
    own tokens."""
    tokens: int
    """Tokens after the prompt."""
    given_tokens: int
    """The given tokens among them."""
    finish_reason: FinishReason
    outcome: dict[str, Any]
    """The environment's own account: `score`, `turns`, `ended`, `tool_errors`, `seconds_away`, `restarted`,
    `dropped`."""
    terms: dict[str, float | None]
    """Each reward's value, before weighting; None if it gave none."""


class EpisodeTrialResult(Message):
    """The result of a trial."""

    episodes: list[TriedEpisode] = Field(default=[])
    error: str | None = None
    """Reason why nothing could be played or scored."""
