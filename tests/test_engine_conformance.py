"""What every engine must do, on the same shares: an engine that does not pass is none.

The engines are those that are installed: vLLM has an environment of its own, and `make test-vllm` runs the suite there.
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from engine_shares import (
    SAMPLING,
    Results,
    assert_same,
    continued,
    generate,
    reference_log_probs,
    save_model,
    settings_of,
    share,
    version,
)
from rlhfless_functions.engines.base import Engine, NonFiniteLogitsError, SequenceTask
from rlhfless_functions.engines.choice import EngineChoice, installed_engines, make_engine
from rlhfless_functions.engines.seeds import sample_seed
from rlhfless_functions.settings import EngineName, EngineSettings, LoraSettings, ModelSettings, SamplingSettings
from rlhfless_functions.task import TaskError
from rlhfless_functions.weights import attach_adapter, load_policy, publish_adapter

torch.set_num_threads(1)

NewEngine = Callable[[], Engine]


# --- engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=installed_engines())
def name(request: pytest.FixtureRequest) -> Iterator[EngineName]:
    yield request.param
    _kept.clear()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


@pytest.fixture
def new_engine(name: EngineName) -> NewEngine:
    return lambda: make_engine(EngineChoice(name, "the test says so"), EngineSettings())


_kept: dict[str, Engine] = {}
"""An engine for all tests that need no fresh one: vLLM takes a while to start."""


@pytest.fixture
def engine(name: EngineName, new_engine: NewEngine, folder: Path) -> Engine:
    made = _kept[name] if name in _kept else _kept.setdefault(name, new_engine())
    made.load(settings_of(folder), version(folder))
    return made


@pytest.fixture
def elsewhere(name: EngineName, new_engine: NewEngine, engine: Engine, folder: Path) -> Engine:
    """Where a share goes on after a cut; vLLM has one engine in a process, and so goes on there."""
    if name == "vllm":
        return engine
    other = new_engine()
    other.load(settings_of(folder), version(folder))
    return other


# --- what is sampled ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_tempered_distribution(engine: Engine, folder: Path, temperature: float) -> None:
    tasks = share(8, 2)
    sampling = SAMPLING.model_copy(update={"temperature": temperature})
    results = generate(engine, tasks, sampling)
    for task in tasks[::3]:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, temperature)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ],
)
def test_attention_of_every_kind_is_the_models_own(
    new_engine: NewEngine, tmp_path: Path, tiny_model: Path, kind: str, changes: dict[str, Any]
) -> None:
    folder = save_model(tmp_path, tiny_model, kind, **changes)
    engine = new_engine()
    engine.load(settings_of(folder), version(folder))
    tasks = share(8, 1)
    results = generate(engine, tasks)
    for task in tasks:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-5)


def test_a_bfloat16_model_gives_log_probs_near_the_exact_ones(new_engine: NewEngine, folder: Path) -> None:
    engine = new_engine()
    engine.load(ModelSettings(source=str(folder), dtype="bfloat16"), version(folder))
    tasks = share(8, 1)
    results = generate(engine, tasks)
    differences = []
    for task in tasks:
        result = results[task.prompt, task.index]
        expected = reference_log_probs(folder, task, result.response_tokens, 1.0)
        differences += [abs(a - b) for a, b in zip(result.log_probs, expected, strict=True)]
    assert sum(differences) / len(differences) < 0.05


def test_samples_of_a_group_differ_and_seeds_matter(engine: Engine) -> None:
    first = generate(engine, share(1, 8))
    assert len({tuple(result.response_tokens) for result in first.values()}) == 8
    other = generate(engine, share(1, 8, seed=1))
    assert first[0, 0].response_tokens != other[0, 0].response_tokens


@pytest.mark.parametrize("prompts", [[0, 3, 7]])
def test_at_a_low_temperature_the_likeliest_token_is_taken(engine: Engine, folder: Path, prompts: list[int]) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tasks = [task for task in share(8, 1) if task.prompt in prompts]
    results = generate(engine, tasks, SAMPLING.model_copy(update={"temperature": 0.01}))
    for task in tasks:
        greedy = model.generate(
            torch.tensor([list(task.prompt_tokens)]), do_sample=False, max_new_tokens=SAMPLING.max_response_tokens
        )
        assert results[task.prompt, task.index].response_tokens == greedy[0, len(task.prompt_tokens) :].tolist()


def test_every_engine_samples_the_same_tokens_from_the_same_seeds(engine: Engine, folder: Path) -> None:
    reference = make_engine(EngineChoice("transformers", "the test says so"), EngineSettings())
    reference.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(8, 4)), generate(reference, share(8, 4)))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_order_and_room_gives_the_same_samples(engine: Engine, data: st.DataObject) -> None:
    tasks = share(8, 3)
    whole = generate(engine, tasks)
    order = data.draw(st.permutations(tasks))
    actors = data.draw(st.integers(1, 4))
    budget = data.draw(st.sampled_from([None, 200, 1000]))
    parts: Results = {}
    for actor in range(actors):
        if mine := order[actor::actors]:
            parts |= generate(engine, mine, budget=budget)
    assert_same(parts, whole)


def test_cut_after_every_token_and_continued_elsewhere_gives_the_same_samples(
    engine: Engine, elsewhere: Engine
) -> None:
    tasks = share(8, 1)
    sampling = SAMPLING.model_copy(update={"max_response_tokens": 18})
    whole = generate(engine, tasks, sampling)
    for cut in range(1, sampling.max_response_tokens):
        run = engine.start(tasks, sampling, None)
        finished = [result for _ in range(cut) for result in run.step()]
        partials = run.unfinished()
        for partial in partials:
            assert partial.finish_reason == "cut"
            assert partial.response_tokens == whole[partial.prompt, partial.index].response_tokens[:cut]
            assert len(partial.log_probs) == cut
        done = {(result.prompt, result.index): result for result in finished}
        rest = [task for task in tasks if (task.prompt, task.index) not in done]
        assert len(partials) == len(rest)
        if rest:
            done |= generate(elsewhere, continued(rest, partials)[::-1], sampling)
        assert_same(done, whole)


def test_a_storm_of_cuts_leaves_nothing_behind(engine: Engine) -> None:
    """Runs are abandoned at every stage, some before their first token, some many times over."""
    tasks = share(8, 2)
    whole = generate(engine, tasks)
    pending = tasks
    for _ in range(3):
        for steps in (0, 1, 0, 2):
            run = engine.start(pending, SAMPLING, None)
            for _ in range(steps):
                run.step()
    run = engine.start(pending, SAMPLING, None)
    done = {(result.prompt, result.index): result for _ in range(4) for result in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
    assert_same(done | generate(engine, rest), whole)


def test_a_share_may_be_far_larger_than_the_batch(engine: Engine) -> None:
    sampling = SAMPLING.model_copy(update={"max_response_tokens": 3})
    run = engine.start(share(125, 8), sampling, 20 * 64)
    most = 0
    results = []
    while run.running or run.waiting:
        results += run.step()
        most = max(most, run.running)
    assert len({(result.prompt, result.index) for result in results}) == 1000
    assert 8 <= most <= 20


def test_a_long_response_continues_where_it_was_cut(new_engine: NewEngine, tmp_path: Path, tiny_model: Path) -> None:
    folder = save_model(tmp_path, tiny_model, max_position_embeddings=512, tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][1] = 0  # With the others' logits far above and below 0, EOS is never sampled.
    save_file(weights, file, metadata={"format": "pt"})
    engine = new_engine()
    engine.load(settings_of(folder), version(folder))
    sampling = SamplingSettings(max_prompt_tokens=64, max_response_tokens=330, temperature=0.1)
    tasks = share(8, 1)[7:]
    whole = generate(engine, tasks, sampling)[7, 0]
    assert whole.finish_reason == "truncated"
    run = engine.start(tasks, sampling, None)
    for _ in range(300):
        run.step()
    assert_same(generate(engine, continued(tasks, run.unfinished()), sampling), {(7, 0): whole})


# --- how responses end -------------------------------------------------------------------------------------------


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


# --- room --------------------------------------------------------------------------------------------------------


def test_the_cache_budget_bounds_the_running_sequences_and_order_is_kept(engine: Engine) -> None:
    tasks = [task for task in share(8, 2) if len(task.prompt_tokens) < 33]
    needed = 64  # 32 + 24 tokens, in whole blocks
    run = engine.start(tasks, SAMPLING, 3 * needed)
    order = {(task.prompt, task.index): place for place, task in enumerate(tasks)}
    finished = 0
    while run.running or run.waiting:
        finished += len(run.step())
        assert run.running <= 3
        admitted = finished + run.running
        assert {order[prompt, index] for prompt, index, _ in run.lengths()} <= set(range(admitted))
    assert finished == len(tasks)


def test_a_sequence_that_cannot_fit_the_budget_is_refused(engine: Engine) -> None:
    with pytest.raises(TaskError, match=r"can have 64 tokens .* has room for 63") as caught:
        engine.start(share(8, 1), SAMPLING, 63)
    assert caught.value.reason == "bad_request"


def test_a_prompt_beyond_the_models_positions_is_refused(engine: Engine) -> None:
    task = SequenceTask(5, 0, [2] * 120, seed=0)
    with pytest.raises(TaskError, match=r"prompt 5 has 120 tokens.*model's 128 positions"):
        engine.start([task], SAMPLING, None)


def test_a_prompt_without_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(TaskError, match="prompt 5 has no tokens"):
        engine.start([SequenceTask(5, 0, [], seed=0)], SAMPLING, None)


def test_lengths_count_the_tokens_of_the_running_sequences(engine: Engine) -> None:
    run = engine.start(share(2, 2), SAMPLING, None)
    run.step()
    run.step()
    assert run.waiting == 0
    assert [length for *_, length in run.lengths()] == [2] * run.running
    assert [len(partial.response_tokens) for partial in run.unfinished()] == [2] * run.running


def test_continued_sequences_that_still_wait_are_not_lost_by_another_cut(engine: Engine) -> None:
    tasks = share(8, 1)
    run = engine.start(tasks, SAMPLING, None)
    run.step()
    partials = run.unfinished()
    again = engine.start(continued(tasks, partials), SAMPLING, 64)
    again.step()
    kept = {(partial.prompt, partial.index): len(partial.response_tokens) for partial in again.unfinished()}
    assert kept.keys() >= {(partial.prompt, partial.index) for partial in partials[1:]}


# --- weights -----------------------------------------------------------------------------------------------------


def test_weights_are_swapped_whole(new_engine: NewEngine, engine: Engine, folder: Path, tmp_path: Path) -> None:
    other = save_model(tmp_path, folder, seed=7)
    tasks = share(8, 2)
    before = generate(engine, tasks)
    engine.load(settings_of(folder), version(other, 1))
    swapped = generate(engine, tasks)
    fresh = new_engine()
    fresh.load(settings_of(folder), version(other, 1))
    assert_same(swapped, generate(fresh, tasks))
    assert {key: result.response_tokens for key, result in swapped.items()} != {
        key: result.response_tokens for key, result in before.items()
    }
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, tasks), before)


def test_a_prefix_that_was_computed_with_other_weights_is_not_used_again(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, folder, seed=7)
    long = [2 + 7 * token % 60 for token in range(100)]
    task = SequenceTask(0, 0, long, sample_seed(0, "training", 1, 0, 0))
    generate(engine, [task])
    engine.load(settings_of(folder), version(other, 1))
    result = generate(engine, [task])[0, 0]
    assert result.log_probs == pytest.approx(reference_log_probs(other, task, result.response_tokens, 1.0), abs=2e-4)


@pytest.mark.parametrize("with_head", [False, True])
def test_tied_weights_are_swapped_in_the_output_layer_too(
    new_engine: NewEngine, tmp_path: Path, tiny_model: Path, with_head: bool
) -> None:
    first = save_model(tmp_path / "first", tiny_model, tie_word_embeddings=True)
    other = save_model(tmp_path / "other", tiny_model, seed=7, tie_word_embeddings=True)
    if with_head:
        file = other / "model.safetensors"
        weights = load_file(file)
        save_file(
            weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, file, metadata={"format": "pt"}
        )
    engine = new_engine()
    engine.load(settings_of(first), version(first))
    generate(engine, share(2, 1))
    engine.load(settings_of(first), version(other, 1))
    for task in share(4, 1):
        result = generate(engine, [task])[task.prompt, 0]
        expected = reference_log_probs(other, task, result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-4)


def test_another_model_takes_the_place_of_the_first(
    new_engine: NewEngine, engine: Engine, tmp_path: Path, tiny_model: Path
) -> None:
    other = save_model(tmp_path, tiny_model, "mistral", hidden_size=64)
    generate(engine, share(2, 1))
    engine.load(settings_of(other), version(other))
    results = generate(engine, share(2, 1))
    fresh = new_engine()
    fresh.load(settings_of(other), version(other))
    assert_same(results, generate(fresh, share(2, 1)))


@pytest.mark.parametrize("fault", ["missing", "truncated", "other shape"])
def test_weights_that_cannot_be_had_leave_the_engine_empty_but_usable(
    engine: Engine, folder: Path, tmp_path: Path, fault: str
) -> None:
    bad = tmp_path / "bad"
    if fault == "other shape":
        save_model(bad, folder, hidden_size=64)
    elif fault == "truncated":
        shutil.copytree(folder, bad)
        file = bad / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    before = generate(engine, share(2, 1))
    with pytest.raises(TaskError) as caught:
        engine.load(settings_of(folder), version(bad, 1))
    assert caught.value.reason == ("artifact_missing" if fault == "missing" else "model_unloadable")
    assert str(bad) in str(caught.value)
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(2, 1), SAMPLING, None)
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(2, 1)), before)


def test_an_adapter_is_swapped_on_its_backbone(new_engine: NewEngine, folder: Path, tmp_path: Path) -> None:
    model = settings_of(folder, lora=LoraSettings(rank=4))
    policy = attach_adapter(load_policy(settings_of(folder), version(folder)), LoraSettings(rank=4))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    publish_adapter(str(tmp_path / "adapter"), policy)
    engine = new_engine()
    engine.load(model, version(folder))
    plain = generate(engine, share(4, 2))
    engine.load(model, version(folder, 1, str(tmp_path / "adapter")))
    adapted = generate(engine, share(4, 2))
    engine.load(model, version(folder))
    assert_same(generate(engine, share(4, 2)), plain)
    assert [result.response_tokens for result in plain.values()] != [
        result.response_tokens for result in adapted.values()
    ]
    merged = policy.merge_and_unload().eval()
    for task in share(4, 2):
        result = adapted[task.prompt, task.index]
        with torch.no_grad():
            logits = merged(torch.tensor([[*task.prompt_tokens, *result.response_tokens]])).logits[0]
        start = len(task.prompt_tokens) - 1
        log_probs = torch.log_softmax(logits[start : start + len(result.response_tokens)], -1)
        expected = log_probs.gather(1, torch.tensor(result.response_tokens)[:, None])[:, 0].tolist()
        assert result.log_probs == pytest.approx(expected, abs=1e-4)


def test_non_finite_logits_name_the_sequence_and_leave_nothing_behind(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    """Token 65 has a NaN embedding: the first to sample it is the first to fail."""
    before = generate(engine, share(8, 2))
    poisoned = shutil.copytree(folder, tmp_path / "poisoned")
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    engine.load(settings_of(folder), version(poisoned, 1))
    tasks = [SequenceTask(task.prompt, task.index, [2, 3, 4], task.seed) for task in share(8, 4)]
    with pytest.raises(NonFiniteLogitsError) as caught:
        generate(engine, tasks)
    fine = {(task.prompt, task.index): task for task in tasks}
    assert (caught.value.prompt, caught.value.index) in fine
    assert caught.value.position > 0
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(8, 2)), before)
