"""The model to train, and its number formats."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class LoraSettings(Settings):
    """Train low-rank adapters instead of the whole model; the reference policy is then the model with them off."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rank of the adapter matrices (peft's `r`)."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the adapter's input while learning; any value above 0 makes trainer and sampler differ."""
    target_modules: list[str] = Field(default=["all-linear"], min_length=1)
    """Names of the layers that get an adapter, or `all-linear`."""
    export: Literal["merged", "adapter"] = "merged"
    """The job's output: a plain model with the adapter merged into it, or the adapter as a peft folder."""


class ModelSettings(Settings):
    """The model to train."""

    source: str = Field(min_length=1)
    """A Hugging Face folder (relative to the job file), an fsspec URI of one, or a name on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hugging Face hub."""
    tokenizer: str | None = None
    """Source of the tokenizer; by default the model's."""
    chat_template: str | None = None
    """A Jinja chat template, or the path of a file with one; by default the tokenizer's own."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the weights for generation and preparation; the learner keeps float32 master weights."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights."""
