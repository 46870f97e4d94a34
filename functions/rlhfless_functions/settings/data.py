"""The sources of prompts, and their conversion to token ids."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rlhfless_functions.settings.base import Settings

HUB = "hub:"
"""Beginning of a source that is a dataset on the Hugging Face hub."""


class RowFunction(Settings):
    """A Python function of yours for each row."""

    file: str = Field(min_length=1)
    """Path (relative to the job file) or fsspec URI of the Python file."""
    function: str = Field(min_length=1)
    """Name of the function in that file."""


class SourceSettings(Settings):
    """A source of prompts, and how its rows are read."""

    source: str | None = Field(default=None, min_length=1)
    """A file of JSON lines, JSON, Parquet, CSV, TSV or Arrow, a folder or pattern of such files, or a saved `datasets`
    folder: a path (relative to the job file) or any fsspec URI. `hub:OWNER/NAME` is a dataset on the Hugging Face
    hub."""
    format: Literal["auto", "jsonl", "parquet", "csv", "tsv", "arrow", "datasets"] = "auto"
    """Format of the source; `auto` derives it from the name."""
    subset: str | None = Field(default=None, min_length=1)
    """Configuration of a dataset on the hub, if it has several."""
    split: str | None = Field(default=None, min_length=1)
    """Split of a dataset that has several; by default `train`."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch, tag or commit of a dataset on the hub."""
    map: RowFunction | None = None
    """Function `fn(row)` or `fn(row, number)` that returns a row's new columns, as for `datasets.map`."""
    filter: RowFunction | None = None
    """Function `fn(row)` or `fn(row, number)` that returns whether to keep a row. It gets what `map` returns."""
    prompt_column: str | None = None
    """Column of the prompt, as text or as chat messages; by default the first of `prompt`, `messages`, `question` and
    `problem` that the source has. Chats that all end with the assistant's message count last."""
    ground_truth_column: str | None = None
    """Column that rewards get as `ground_truth`; by default the first of `ground_truth`, `expected_answer`,
    `final_answer`, `reference_answer`, `correct_answer`, `gt_answer`, `answer`, `solution`, `label`,
    `reward_model.ground_truth` and `reward_spec.ground_truth` that the source has."""
    system_prompt: str | None = None
    """System message put before every prompt; needs a chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, such as `enable_thinking: false`. A row's own column `chat_template_kwargs` comes
    before it."""


class MixedSource(SourceSettings):
    """One of several sources. What it leaves out is as in `data`."""

    source: str = Field(min_length=1)
    """As `data.source`."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """Times that each row comes in an epoch. With 0.5, half of the rows come, and the other half in the next epoch."""


class DataSettings(SourceSettings):
    """The prompts: one source, or several."""

    sources: list[MixedSource] | None = Field(default=None, min_length=1, max_length=64)
    """Several sources, in place of `source`. An epoch has the rows of all of them."""
    long_prompts: Literal["drop", "fail"] = "drop"
    """What to do with prompts longer than `sampling.maxPromptTokens`: drop and count them, or fail."""
    answered_prompts: Literal["drop", "continue", "fail"] = "drop"
    """What to do with chats whose last message is the assistant's. `drop` drops and counts them, because the message
    may be the answer to learn. `continue` has the model continue the message as the beginning of an answer. `fail`
    raises an error."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch. The order depends on the job's seed."""

    @property
    def parts(self) -> list[MixedSource]:
        """All sources, each with everything that says how it is read."""
        own = {name: getattr(self, name) for name in SourceSettings.model_fields}
        if self.sources is None:
            return [MixedSource(**own)]
        return [
            MixedSource(**{**own, **{name: getattr(each, name) for name in each.model_fields_set}})
            for each in self.sources
        ]

    @model_validator(mode="after")
    def _one_or_several(self) -> Self:
        if (self.source is None) == (self.sources is None):
            have = "neither" if self.source is None else "both"
            raise ValueError(f"data needs source or sources; it has {have}")
        return self
