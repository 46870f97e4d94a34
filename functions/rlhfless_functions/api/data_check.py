"""The question and the answer of `rlhfless validate --data`. It belongs to no stage."""

from typing import Any

from pydantic import Field

from rlhfless_functions.api.messages import Message
from rlhfless_functions.api.results import DataCounts
from rlhfless_functions.settings import (
    DataSettings,
    EnvironmentSettings,
    ModelSettings,
    RewardSettings,
    SamplingSettings,
)


class DataCheck(Message):
    """Read a dataset as training reads it, and publish nothing. The fields are those of `MaterializeRequest`."""

    model: ModelSettings
    data: DataSettings
    sampling: SamplingSettings
    environment: EnvironmentSettings | None = None
    rewards: list[RewardSettings] = Field(default=[])
    """Rewards that will score the responses."""
    most_dropped: float = Field(default=1.0, ge=0, le=1)
    """Largest share of the rows that may be dropped."""
    prompts: int = Field(default=1, ge=0)
    """Number of each source's first prompts to show."""


class ShownPrompt(Message):
    """A prompt as the model sees it."""

    source: str
    row: int
    """Its row as training numbers it: usable prompts from 0, one source after the other. If the data has a fault, each
    source begins at 0."""
    text: str
    """Text of all its tokens, special tokens too."""
    tokens: int
    """Number of its tokens."""
    is_chat: bool
    """Whether the chat template was applied; otherwise it is plain text."""
    ground_truth: Any = None
    """The `ground_truth` that rewards get."""


class DataCheckResult(Message):
    """The first prompts of a dataset, and what keeps training from using it."""

    prompts: list[ShownPrompt] = Field(default=[])
    counts: DataCounts | None = None
    """Counts and notes of all rows; None if the data has a fault."""
    faults: list[str] = Field(default=[])
    """Reasons why training can't use the data, each with its remedy; empty if it can."""
