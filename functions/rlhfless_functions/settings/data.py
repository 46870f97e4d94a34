"""Where prompts come from and how they become token ids."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class DataSettings(Settings):
    """A dataset of prompts."""

    source: str = Field(min_length=1)
    """A JSONL or Parquet file, or a saved `datasets` folder: a path (relative to the job file) or any fsspec URI."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    """Form of the source; `auto` tells by its name."""
    prompt_column: str | None = None
    """Column of the prompt, as text or as chat messages; `prompt`, `messages` or `question` if left out."""
    ground_truth_column: str | None = None
    """Column handed to rewards as `ground_truth`; `ground_truth`, `answer`, `solution`, `label`,
    `reward_model.ground_truth` or `reward_spec.ground_truth` if left out."""
    system_prompt: str | None = None
    """System message put before every prompt; needs a chat template."""
    long_prompts: Literal["drop", "fail"] = "drop"
    """What becomes of prompts longer than `sampling.maxPromptTokens`: dropped and counted, or an error."""
    answered_prompts: Literal["drop", "continue", "fail"] = "drop"
    """What becomes of chats whose last message is the assistant's: dropped and counted, as it may be the answer that is
    to be learnt; continued by the model, where it is the beginning of one; or an error."""
    shuffle: bool = True
    """Draw the prompts in a new order, made from the job's seed, in each epoch."""
