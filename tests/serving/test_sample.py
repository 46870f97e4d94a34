"""A trained model is asked as it was trained: template, system prompt, special tokens, stops."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, GenerationMixin

from rlhfless_functions.api import PROMPTING, Prompting
from rlhfless_functions.serving.sample import sample
from tests.data.reading import TEMPLATE, prompts_of, write_jsonl


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the model's `generate` got."""
    given: dict[str, Any] = {}

    def generate(self: Any, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        given.update(options, ids=input_ids[0].tolist(), config=self.generation_config)
        return input_ids

    monkeypatch.setattr(GenerationMixin, "generate", generate)
    return given


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model with a chat template, and a tokenizer that begins plain text with a token."""
    from tokenizers.processors import TemplateProcessing

    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE + "{% if brief is defined %}#{% endif %}"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    GenerationConfig(eos_token_id=5, repetition_penalty=2.0).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("row", ["1+1=", [{"role": "user", "content": "1+1="}]])
@pytest.mark.parametrize("settings", [{}, {"system_prompt": "add"}, {"chat_template_kwargs": {"brief": True}}])
def test_a_prompt_is_the_one_of_training(
    model: Path, tmp_path: Path, seen: dict[str, Any], row: Any, settings: dict[str, Any]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": row}])
    ((prompt,), _) = prompts_of(source, AutoTokenizer.from_pretrained(model), **settings)
    (model / PROMPTING).write_text(Prompting(chat=prompt.messages is not None, **settings).model_dump_json())
    sample(str(model), "1+1=", count=1, temperature=1.0, max_tokens=2, seed=0)
    assert seen["ids"] == prompt.tokens
    if not isinstance(row, str):
        sample(str(model), json.dumps(row), count=1, temperature=1.0, max_tokens=2, seed=0)
        assert seen["ids"] == prompt.tokens


def test_responses_end_as_in_training_and_without_penalties(model: Path, seen: dict[str, Any]) -> None:
    (model / PROMPTING).write_text(Prompting(stop=["="]).model_dump_json())
    sample(str(model), "1", count=1, temperature=1.0, max_tokens=2, seed=0)
    config = seen["config"]
    assert config.stop_strings == ["="] and "tokenizer" in seen
    assert config.eos_token_id == [1, 5]
    assert config.repetition_penalty in (None, 1.0)


def test_a_model_from_elsewhere_is_asked_in_its_template(model: Path, seen: dict[str, Any]) -> None:
    sample(str(model), "1", count=1, temperature=0, max_tokens=2, seed=0)
    assert AutoTokenizer.from_pretrained(model).decode(seen["ids"]) == "u:1\na:"


def test_stops_end_responses(model: Path) -> None:
    stops = list("0123456789abcdefghij")
    (model / PROMPTING).write_text(Prompting(stop=stops).model_dump_json())
    (response,) = sample(str(model), "1", count=1, temperature=1.0, max_tokens=60, seed=0)
    assert not any(stop in response[:-1] for stop in stops)


def test_the_settings_of_a_job_say_how_its_model_was_prompted() -> None:
    from rlhfless_operator.records.folder import JobFolder
    from rlhfless_operator.training.requests.builder import RequestBuilder
    from tests.jobs import job

    spec = {"data": {"source": "a.jsonl", "systemPrompt": "add"}, "sampling": {"stop": ["="]}}
    made = RequestBuilder(job(**spec), JobFolder("x"), "u").prompting(chat=True)
    assert made == Prompting(chat=True, system_prompt="add", stop=["="])
