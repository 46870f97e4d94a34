"""Which model is trained, and how it is held in memory."""

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
    """Dropout on the adapter's input while learning; anything but 0 makes trainer and sampler differ."""
    target_modules: list[str] = Field(default=["all-linear"], min_length=1)
    """Names of the layers that get an adapter, or `all-linear`."""
    export: Literal["merged", "adapter"] = "merged"
    """What the job leaves behind: a plain model with the adapter merged into it, or the adapter as a peft folder."""


class ModelSettings(Settings):
    """The model to train."""

    source: str = Field(min_length=1)
    """A Hugging Face folder (relative to the job file), a fsspec URI of one, or a name on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit, for a name on the Hugging Face hub."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not with the model."""
    chat_template: str | None = None
    """A Jinja chat template, or the path of a file that holds one; the tokenizer's own if left out."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of the weights that generate and prepare; the learner keeps float32 master weights."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights."""
