"""Responses of earlier steps: what is missing or damaged is passed over with a line in the log."""

import logging
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhfless_functions.data.draft_history import KnownResponse, vocabulary_digest, write_draft_history
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.generation.drafting.history import HistoryCache, HistoryLoader


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


def response(prompt: int, tokens: list[int]) -> GeneratedSample:
    return GeneratedSample(prompt, 0, list(range(2, 30)), tokens, [0.0] * len(tokens), "stop", [])


def write(folder: Path, name: str, responses: list[GeneratedSample], tokenizer: PreTrainedTokenizerBase) -> None:
    write_draft_history(str(folder / name), responses, vocabulary_digest(tokenizer.get_vocab()))


def loaded(
    folders: list[Path], prompts: set[int], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[KnownResponse], HistoryLoader]:
    loader = HistoryLoader([str(folder) for folder in folders], prompts, tokenizer, HistoryCache())
    loader._thread.join()
    found: list[KnownResponse] = []
    while chunk := loader.take():
        found += chunk
    return found, loader


def test_a_shares_prompts_are_read_and_of_the_last_folder_everybodys(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    write(tmp_path / "step-1", "a.parquet", [response(1, [5, 6]), response(2, [7])], tokenizer)
    write(tmp_path / "step-2", "a.parquet", [response(3, [8])], tokenizer)
    found, loader = loaded([tmp_path / "step-1", tmp_path / "step-2"], {1}, tokenizer)
    assert [(each.prompt, list(each.tokens)) for each in found] == [(1, [5, 6]), (3, [8])]
    assert list(found[0].prompt_end) == list(range(14, 30))
    assert loader.unreadable == 0


def test_what_is_damaged_or_anothers_is_passed_over_and_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "torn.parquet").write_bytes(b"PAR1 and then nothing")
    write_draft_history(str(tmp_path / "step-2" / "other.parquet"), [response(1, [5])], "another vocabulary")
    write(tmp_path / "step-3", "a.parquet", [response(1, [8])], tokenizer)
    with caplog.at_level(logging.WARNING):
        found, loader = loaded([tmp_path / f"step-{step}" for step in (1, 2, 3, 4)], {1}, tokenizer)
    assert [list(each.tokens) for each in found] == [[8]]
    assert loader.unreadable == 2
    reasons = {record.fields["uri"].rsplit("/", 1)[1]: record.fields["reason"] for record in caplog.records}
    assert reasons.keys() == {"torn.parquet", "other.parquet"}
    assert "another tokenizer" in reasons["other.parquet"]


def test_a_part_is_read_once(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    write(tmp_path, "a.parquet", [response(1, [5])], tokenizer)
    cache, digest = HistoryCache(), vocabulary_digest(tokenizer.get_vocab())
    uri = str(tmp_path / "a.parquet")
    first = cache.read(uri, digest)
    (tmp_path / "a.parquet").unlink()
    assert cache.read(uri, digest) == first
