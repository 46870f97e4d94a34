"""How responses are sampled."""

from typing import Annotated

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class EngineSampling(Settings):
    """How an engine is asked to sample: as in training, or greedily, which nothing can be learnt from."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 takes the likeliest token each time, and reports its log-probability at 1."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens, chat template included (max_prompt_length)."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response in tokens, EOS included (max_response_length, max_completion_length)."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=16)
    """Strings that end a response, besides the model's own end-of-sequence tokens."""


class SamplingSettings(EngineSampling):
    """How responses are sampled. Without nucleus and top-k sampling, which the log-probabilities would not honour."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, when sampling and when learning alike."""
