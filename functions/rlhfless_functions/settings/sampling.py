"""The sampling of responses."""

from typing import Annotated

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class EngineSampling(Settings):
    """Sampling settings of an engine's request. Temperature 0 is greedy; only evaluations use it."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 always takes the likeliest token, and reports its log-probability at temperature 1."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longest prompt in tokens, chat template included (max_prompt_length)."""
    max_response_tokens: int = Field(default=1024, ge=1)
    """Longest response in tokens, EOS included (max_response_length, max_completion_length)."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=16)
    """Strings that end a response, besides the model's own end-of-sequence tokens."""


class SamplingSettings(EngineSampling):
    """How responses are sampled. Nucleus and top-k sampling are missing, because log-probabilities would not match."""

    temperature: float = Field(default=1.0, gt=0)
    """Divides the logits, in sampling and in learning alike."""
