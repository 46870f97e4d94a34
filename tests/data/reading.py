"""Tokenizers and files that datasets are read with, and what becomes of their rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhfless_functions.data.dataset_files import read_tables
from rlhfless_functions.data.datasets import make_prompts
from rlhfless_functions.data.prompts import Prompt
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import DataSettings, SamplingSettings

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}:{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def chat_tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(
    source: str | Path, tokenizer: PreTrainedTokenizerBase, positions: int | None = None, **settings: Any
) -> tuple[list[Prompt], int]:
    sampling = SamplingSettings(max_prompt_tokens=settings.pop("longest", 64), max_response_tokens=8)
    data = DataSettings(source=str(source), **settings)
    prompts, counts = make_prompts(read_tables(data), data, sampling, tokenizer, positions)
    return prompts, counts.left_out


def counts_of(source: str, tokenizer: PreTrainedTokenizerBase, longest: int = 64, **settings: Any) -> dict[str, Any]:
    """What became of a dataset's rows: the counts that are not 0, and where the first of each is."""
    data = DataSettings(source=source, **settings)
    _, counts = make_prompts(read_tables(data), data, SamplingSettings(max_prompt_tokens=longest), tokenizer)
    return {name: value for name, value in counts.model_dump(exclude={"chats", "notes", "sizes"}).items() if value}


def notes_of(source: str | Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> list[str]:
    """What a person is told of how a dataset was read."""
    rewards = settings.pop("rewards", ())
    data = DataSettings(source=str(source), **settings)
    return make_prompts(read_tables(data), data, SamplingSettings(), tokenizer, rewards=rewards)[1].notes


def fault(*arguments: Any, **settings: Any) -> str:
    with pytest.raises(TaskError) as raised:
        prompts_of(*arguments, **settings)
    assert raised.value.reason in ("data_invalid", "artifact_missing")
    assert not raised.value.retryable
    return str(raised.value)
