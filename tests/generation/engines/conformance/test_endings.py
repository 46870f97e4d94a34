"""An end token, a stop string or the longest length ends a response, and at the same token in every engine."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlhfless_functions.generation.engines.base import Engine, SequenceTask
from tests.generation.engines.shares import (
    SAMPLING,
    NewEngine,
    assert_same,
    continued,
    generate,
    save_model,
    settings_of,
    share,
    version,
)


def test_eos_ends_a_response_and_the_longest_response_truncates_it(engine: Engine) -> None:
    results = generate(engine, share(8, 6)).values()
    assert {result.finish_reason for result in results} == {"stop", "truncated"}
    for result in results:
        assert 1 not in result.response_tokens[:-1]
        assert len(result.response_tokens) == len(result.log_probs)
        if result.finish_reason == "stop":
            assert result.response_tokens[-1] == 1
        else:
            assert result.response_tokens[-1] != 1
            assert len(result.response_tokens) == SAMPLING.max_response_tokens


def test_all_end_tokens_of_the_generation_config_and_the_tokenizer_count(
    new_engine: NewEngine, tmp_path: Path, tiny_model: Path
) -> None:
    folder = save_model(tmp_path, tiny_model)
    GenerationConfig(eos_token_id=[10, 11, 12, 13, 14]).save_pretrained(folder)
    engine = new_engine()
    engine.load(settings_of(folder), version(folder))
    ended_by = set()
    for result in generate(engine, share(8, 12)).values():
        assert not {1, 10, 11, 12, 13, 14} & set(result.response_tokens[:-1])
        if result.finish_reason == "stop":
            ended_by.add(result.response_tokens[-1])
    assert ended_by == {1, 10, 11, 12, 13, 14}


def test_a_padding_token_that_is_the_end_token_changes_nothing(
    new_engine: NewEngine, engine: Engine, tmp_path: Path, folder: Path
) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for name, old, new in (
        ("config.json", '"pad_token_id": 0', '"pad_token_id": 1'),
        ("generation_config.json", '"pad_token_id": 0', '"pad_token_id": 1'),
        ("tokenizer_config.json", '"<pad>"', '"<eos>"'),
    ):
        text = (copy / name).read_text()
        assert old in text
        (copy / name).write_text(text.replace(old, new))
    tasks = share(8, 2)
    wanted = generate(engine, tasks)
    padded_with_eos = new_engine()
    padded_with_eos.load(settings_of(copy), version(copy))
    assert_same(generate(padded_with_eos, tasks), wanted)


def test_a_stop_string_of_several_tokens_ends_a_response_with_its_last_token(engine: Engine, folder: Path) -> None:
    tasks = share(8, 6)
    free = generate(engine, tasks)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.decode(free[2, 0].response_tokens)
    stop = [text[4:6], "never to be seen"]
    stopped = generate(engine, tasks, SAMPLING.model_copy(update={"stop": stop}))
    assert free != stopped
    for key, result in stopped.items():
        expected = free[key].response_tokens
        for end in range(1, len(expected) + 1):
            if stop[0] in tokenizer.decode(expected[:end]):
                expected = expected[:end]
                assert result.finish_reason == "stop"
                break
        assert result.response_tokens == expected
        assert result.log_probs == pytest.approx(free[key].log_probs[: len(expected)], abs=2e-4)
    run = engine.start(tasks, SAMPLING.model_copy(update={"stop": stop}), None)
    done = {(r.prompt, r.index): r for _ in range(5) for r in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
    assert_same(done | generate(engine, rest, SAMPLING.model_copy(update={"stop": stop})), stopped)


def test_a_stop_string_that_the_last_allowed_token_completes_ends_the_response_by_itself(
    engine: Engine, folder: Path
) -> None:
    tasks = share(8, 2)
    free = generate(engine, tasks)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    longest = 6
    (chosen,) = [result for result in free.values() if (result.prompt, result.index) == (2, 0)]
    stop = tokenizer.decode(chosen.response_tokens[longest - 2 : longest])
    sampling = SAMPLING.model_copy(update={"max_response_tokens": longest, "stop": [stop]})
    ended = generate(engine, tasks, sampling)
    assert ended[2, 0].response_tokens == chosen.response_tokens[:longest]
    assert ended[2, 0].finish_reason == "stop"
    assert {result.finish_reason for result in ended.values()} == {"stop", "truncated"}
    # The same where another instance goes on just before the last token.
    run = engine.start(tasks, sampling, None)
    done = {(r.prompt, r.index): r for _ in range(longest - 1) for r in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
    assert_same(done | generate(engine, rest, sampling), ended)


def test_a_stop_string_is_found_where_its_characters_are_split_over_tokens(
    new_engine: NewEngine, tmp_path: Path, tiny_model: Path
) -> None:
    """Tokens are single bytes and the model says ü€ü€…: each character takes two or three tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=alphabet[0])
    folder = save_model(tmp_path, tiny_model, vocab_size=256, tie_word_embeddings=False, eos_token_id=0)
    tokenizer.save_pretrained(folder)
    cycle = tokenizer("ü€").input_ids
    file = folder / "model.safetensors"
    weights = {name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}
    weights["model.norm.weight"] += 1
    for i, token in enumerate(cycle):
        weights["model.embed_tokens.weight"][token, i] = 1
        weights["lm_head.weight"][cycle[(i + 1) % len(cycle)], i] = 10
    save_file(weights, file, metadata={"format": "pt"})
    engine = new_engine()
    engine.load(settings_of(folder), version(folder))
    sampling = SAMPLING.model_copy(update={"stop": ["€ü€"]})
    result = generate(engine, [SequenceTask(0, 0, cycle, seed=1)], sampling)[0, 0]
    assert tokenizer.decode(result.response_tokens) == "ü€ü€"
    assert result.finish_reason == "stop"
