"""Tokenizers: they fit the model, and go where it goes."""

import shutil
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights import load_policy, load_tokenizer, publish_weights
from rlhfless_functions.weights.saving import write_tokenizer
from tests.weights.random_models import random_model, settings_of, version
from tests.weights.random_models import tiny as tiny  # A fixture.


def resized(tiny_model: Path, folder: Path, vocabulary: int) -> Path:
    config = AutoConfig.from_pretrained(tiny_model)
    config.vocab_size = vocabulary
    random_model(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, folder)
    return folder


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = resized(tiny_model, tmp_path / "small", 40)
    with pytest.raises(TaskError, match=r"vocabulary mismatch: .*ids up to 63, .*40 rows; give model\.tokenizer") as it:
        load_tokenizer(settings_of(folder), version(folder))
    assert it.value.reason == "model_unloadable"


def test_a_padded_embedding_is_fine(tiny_model: Path, tmp_path: Path) -> None:
    folder = resized(tiny_model, tmp_path / "large", 128)
    assert len(load_tokenizer(settings_of(folder), version(folder))) == 64


def test_the_tokenizer_may_be_elsewhere(tiny_model: Path, tmp_path: Path) -> None:
    folder = random_model(AutoConfig.from_pretrained(tiny_model), tmp_path / "bare")
    with pytest.raises(TaskError, match=r"/bare cannot be loaded .*give model\.tokenizer"):
        load_tokenizer(settings_of(folder), version(folder))
    assert len(load_tokenizer(settings_of(folder, tokenizer=str(tiny_model)), version(folder))) == 64


def test_the_jobs_chat_template_is_used_and_published(tiny: ModelSettings, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    (tmp_path / "chat.jinja").write_text(template)
    for given in (template, str(tmp_path / "chat.jinja")):
        chat = tiny.model_copy(update={"chat_template": given})
        tokenizer = load_tokenizer(chat, version(tiny.source))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1="
    publish_weights(str(tmp_path / "1"), load_policy(tiny, version(tiny.source)), tokenizer)
    assert AutoTokenizer.from_pretrained(tmp_path / "1").chat_template == template
    with pytest.raises(TaskError, match=r"nothing\.jinja does not exist"):
        load_tokenizer(tiny.model_copy(update={"chat_template": "nothing.jinja"}), version(tiny.source))


def test_a_published_tokenizer_does_not_say_where_it_was_loaded_from(tiny_model: Path, tmp_path: Path) -> None:
    """Otherwise the replay of a run finds another file than the run wrote."""
    written = []
    for offline in (False, True):
        folder = tmp_path / str(offline)
        folder.mkdir()
        write_tokenizer(AutoTokenizer.from_pretrained(tiny_model, local_files_only=offline), folder)
        written.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert written[0] == written[1]


def test_a_damaged_file_of_a_published_folder_is_named_even_if_it_cannot_be_parsed(
    tiny: ModelSettings, tmp_path: Path
) -> None:
    uri = str(tmp_path / "1")
    publish_weights(uri, load_policy(tiny, version(tiny.source)), load_tokenizer(tiny, version(tiny.source)))
    for name, load in (("tokenizer.json", load_tokenizer), ("config.json", load_policy)):
        content = (tmp_path / "1" / name).read_bytes()
        (tmp_path / "1" / name).write_bytes(content[:20] + b"}" + content[21:])
        with pytest.raises(TaskError, match=rf"/1/{name} is corrupt.*(restore|remove|run)") as caught:
            load(tiny, version(uri))
        assert caught.value.reason == "artifact_missing"
        (tmp_path / "1" / name).write_bytes(content)
