"""The source of prompts, and their conversion to token ids."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class DataSettings(Settings):
    """A dataset of prompts."""

    source: str = Field(min_length=1)
    """A JSONL or Parquet file, or a saved `datasets` folder: a path (relative to the job file) or any fsspec URI."""
    format: Literal["auto", "jsonl", "parquet", "datasets"] = "auto"
    """Format of the source; `auto` derives it from the name."""
    prompt_column: str | None = None
    """Column of the prompt, as text or as chat messages; by default `prompt`, `messages` or `question`."""
    ground_truth_column: str | None = None
    """Column that rewards get as `ground_truth`; by default `ground_truth`, `answer`, `solution`, `label`,
    `reward_model.ground_truth` or `reward_spec.ground_truth`."""
    system_prompt: str | None = None
    """System message put before every prompt; needs a chat template."""
    long_prompts: Literal["drop", "fail"] = "drop"
    """What to do with prompts longer than `sampling.maxPromptTokens`: drop and count them, or fail."""
    answered_prompts: Literal["drop", "continue", "fail"] = "drop"
    """What to do with chats whose last message is the assistant's. `drop` drops and counts them, because the message
    may be the answer to learn. `continue` has the model continue the message as the beginning of an answer. `fail`
    raises an error."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch. The order depends on the job's seed."""
