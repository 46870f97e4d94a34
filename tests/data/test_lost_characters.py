"""Characters that the tokenizer does not know are named, whatever it makes of them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.data.reading import chat_tokenizer as chat_tokenizer
from tests.data.reading import notes_of, write_jsonl

LETTERS = "abcdefgh uieo"


def _word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({each: i for i, each in enumerate(["<unk>", *LETTERS])}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return tokenizer


def _unigram() -> Tokenizer:
    """Build sentencepiece's kind, such as T5's: unknown characters become one `<unk>`."""
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((each, -1.0) for each in "▁" + LETTERS)], 0, False))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def _dropping() -> Tokenizer:
    """Build a BPE without an unknown token, which leaves unknown characters out."""
    tokenizer = Tokenizer(models.BPE({each: i for i, each in enumerate(["<unk>", "▁", *LETTERS])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


def _word_piece() -> Tokenizer:
    """Build BERT's kind, without accents: a word with an unknown character becomes one `<unk>`."""
    words = ["<unk>", *LETTERS, *(f"##{each}" for each in LETTERS)]
    tokenizer = Tokenizer(models.WordPiece({each: i for i, each in enumerate(words)}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer


def _byte_level() -> Tokenizer:
    vocabulary = {each: i for i, each in enumerate(["<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """Build Llama 2's kind: bytes stand for unknown characters."""
    vocabulary = ["<unk>", "▁", *LETTERS, *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({each: i for i, each in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace()])
    return tokenizer


def _notes(make: Callable[[], Tokenizer], prompts: list[str], folder: Path) -> list[str]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token="<unk>")
    return notes_of(write_jsonl(folder / "a.jsonl", [{"prompt": prompt} for prompt in prompts]), tokenizer)


@pytest.mark.parametrize("make", [_word_level, _unigram, _dropping, _word_piece])
def test_lost_characters_are_named_with_their_rows(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    (note,) = _notes(make, ["a bad", "a ☃ bad", "fed中 ü☃"] if make is _word_piece else ["a", "a ☃", "b中☃"], tmp_path)
    assert note.startswith(
        "2 prompts have characters that the tokenizer does not know (first line 2): ☃ (U+2603), 中 (U+4E2D)."
    )
    assert "give model.tokenizer one that knows them" in note


@pytest.mark.parametrize("make", [_word_level, _unigram, _dropping, _word_piece, _byte_level, _byte_fallback])
def test_known_characters_pass_without_a_word(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    assert _notes(make, ["a bad", "a deed", "he fed a"], tmp_path) == []


@pytest.mark.parametrize("make", [_byte_level, _byte_fallback])
def test_bytes_stand_for_every_character(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    assert _notes(make, ["a 中 ☃ 👩‍🚀 é\u0301 \u200b\ufeff \U000e0041"], tmp_path) == []


def test_a_text_may_name_the_unknown_token(tmp_path: Path) -> None:
    assert _notes(_unigram, ["a <unk> bad"], tmp_path) == []


def test_many_are_counted(tmp_path: Path) -> None:
    (note,) = _notes(_unigram, ["".join(map(chr, range(0x4E00, 0x4E14)))], tmp_path)
    assert "一 (U+4E00), 丁 (U+4E01)" in note and "and 12 more" in note


def test_chats_and_a_token_that_stands_for_unknown_ones_are_seen_too(
    chat_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The tokenizer writes its padding for what it does not know, and names no unknown token."""
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("1+1=", "2×2=")]
    (note,) = notes_of(write_jsonl(tmp_path / "a.jsonl", rows), chat_tokenizer)
    assert note.startswith("1 prompts have characters that the tokenizer does not know (first line 2): × (U+00D7)")
    assert "reads nothing of use in their place" in note
