"""What every engine must do. A second engine runs through it by one more parameter of the `engine` fixture."""

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.engines.base import Engine, EngineRun, NonFiniteLogitsError, SequenceResult, SequenceTask
from rlhfless_functions.engines.seeds import sample_seed
from rlhfless_functions.engines.transformers import TransformersEngine
from rlhfless_functions.settings import LoraSettings, ModelSettings, SamplingSettings
from rlhfless_functions.task import TaskError
from rlhfless_functions.weights import attach_adapter, load_policy, publish_adapter

torch.set_num_threads(1)

SAMPLING = SamplingSettings(max_prompt_tokens=64, max_response_tokens=24)


# --- models ------------------------------------------------------------------------------------------------------


def save_model(folder: Path, tokenizer_from: Path, kind: str = "qwen3", seed: int = 0, **changes: Any) -> Path:
    """A random model whose distributions really depend on the context."""
    shape = {
        "vocab_size": 66,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.25,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    } | changes
    torch.manual_seed(seed)
    model = MistralForCausalLM(MistralConfig(**shape)) if kind == "mistral" else Qwen3ForCausalLM(Qwen3Config(**shape))
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


def settings_of(folder: Path, **changes: Any) -> ModelSettings:
    return ModelSettings(source=str(folder), dtype="float32", **changes)


def version(folder: Path, number: int = 0, adapter: str | None = None) -> WeightsReference:
    return WeightsReference(version=number, uri=str(folder), adapter=adapter)


@pytest.fixture(params=[TransformersEngine])
def new_engine(request: pytest.FixtureRequest) -> Callable[[], Engine]:
    return request.param


@pytest.fixture
def engine(new_engine: Callable[[], Engine], folder: Path) -> Engine:
    made = new_engine()
    made.load(settings_of(folder), version(folder))
    return made


# --- shares ------------------------------------------------------------------------------------------------------


def prompt_tokens(prompt: int) -> list[int]:
    """Prompts of one to forty tokens."""
    numbers = random.Random(prompt)
    return [numbers.randrange(2, 66) for _ in range([1, 2, 7, 31, 32, 33, 34, 40][prompt % 8])]


def share(prompts: int, samples: int, seed: int = 0) -> list[SequenceTask]:
    return [
        SequenceTask(prompt, index, prompt_tokens(prompt), sample_seed(seed, "training", 1, prompt, index))
        for prompt in range(prompts)
        for index in range(samples)
    ]


def finish(run: EngineRun) -> list[SequenceResult]:
    results = []
    while run.running or run.waiting:
        results += run.step()
    return results


def generate(
    engine: Engine,
    tasks: Sequence[SequenceTask],
    sampling: SamplingSettings = SAMPLING,
    budget: int | None = None,
) -> dict[tuple[int, int], SequenceResult]:
    results = finish(engine.start(tasks, sampling, budget))
    assert len(results) == len(tasks)
    return {(result.prompt, result.index): result for result in results}


_whole: dict[tuple[type[Engine], int, int], dict[tuple[int, int], SequenceResult]] = {}


def whole_share(engine: Engine, prompts: int, samples: int) -> dict[tuple[int, int], SequenceResult]:
    """What the `engine` fixture generates in one go, computed once."""
    key = (type(engine), prompts, samples)
    if key not in _whole:
        _whole[key] = generate(engine, share(prompts, samples))
    return _whole[key]


def continued(tasks: Sequence[SequenceTask], partials: Sequence[SequenceResult]) -> list[SequenceTask]:
    by_key = {(partial.prompt, partial.index): partial for partial in partials}
    return [
        SequenceTask(task.prompt, task.index, task.prompt_tokens, task.seed, partial.response_tokens, partial.log_probs)
        if (partial := by_key.get((task.prompt, task.index)))
        else task
        for task in tasks
    ]


def reference_log_probs(folder: Path, task: SequenceTask, response: Sequence[int], temperature: float) -> list[float]:
    """One plain forward pass in float64."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([[*task.prompt_tokens, *response]])).logits[0]
    start = len(task.prompt_tokens) - 1
    log_probs = torch.log_softmax(logits[start : start + len(response)] / temperature, -1)
    return log_probs.gather(1, torch.tensor(response)[:, None])[:, 0].tolist()


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
        ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    ],
)
def test_attention_of_every_kind_is_the_models_own(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path, kind: str, changes: dict[str, Any]
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


def test_a_bfloat16_model_gives_log_probs_near_the_exact_ones(new_engine: Callable[[], Engine], folder: Path) -> None:
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


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_order_and_room_gives_the_same_bits(engine: Engine, data: st.DataObject) -> None:
    tasks = share(8, 3)
    whole = whole_share(engine, 8, 3)
    order = data.draw(st.permutations(tasks))
    actors = data.draw(st.integers(1, 4))
    budget = data.draw(st.sampled_from([None, 200, 1000]))
    parts: dict[tuple[int, int], SequenceResult] = {}
    for actor in range(actors):
        if mine := order[actor::actors]:
            parts |= generate(engine, mine, budget=budget)
    assert parts == whole


def test_cut_after_every_token_and_continued_elsewhere_gives_the_same_bits(
    new_engine: Callable[[], Engine], folder: Path, engine: Engine
) -> None:
    tasks = share(8, 1)
    sampling = SAMPLING.model_copy(update={"max_response_tokens": 18})
    whole = generate(engine, tasks, sampling)
    elsewhere = new_engine()
    elsewhere.load(settings_of(folder), version(folder))
    for cut in range(1, sampling.max_response_tokens):
        run = engine.start(tasks, sampling, None)
        finished = [result for _ in range(cut) for result in run.step()]
        partials = run.unfinished()
        for partial in partials:
            assert partial.finish_reason == "cut"
            assert partial.response_tokens == whole[partial.prompt, partial.index].response_tokens[:cut]
        done = {(result.prompt, result.index): result for result in finished}
        rest = [task for task in tasks if (task.prompt, task.index) not in done]
        assert len(partials) == len(rest)
        if rest:
            done |= generate(elsewhere, continued(rest, partials)[::-1], sampling)
        assert done == whole


def test_a_response_longer_than_one_replay_pass_continues_exactly(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
) -> None:
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
    assert generate(engine, continued(tasks, run.unfinished()), sampling)[7, 0] == whole


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
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
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
    new_engine: Callable[[], Engine], engine: Engine, tmp_path: Path, folder: Path
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
    padded_with_eos = new_engine()
    padded_with_eos.load(settings_of(copy), version(copy))
    tasks = share(8, 2)
    assert generate(padded_with_eos, tasks) == generate(engine, tasks)


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
        assert result.log_probs == free[key].log_probs[: len(expected)]
    run = engine.start(tasks, SAMPLING.model_copy(update={"stop": stop}), None)
    done = {(r.prompt, r.index): r for _ in range(5) for r in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
    assert done | generate(engine, rest, SAMPLING.model_copy(update={"stop": stop})) == stopped


def test_a_stop_string_is_found_where_its_characters_are_split_over_tokens(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
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


def test_a_prompt_is_computed_once_for_its_group_however_little_room_there_is(engine: Engine) -> None:
    tasks = share(8, 3)
    prompts = sum(len(prompt_tokens(prompt)) for prompt in range(8))
    for budget in (None, 130, 1000):
        run = engine.start(tasks, SAMPLING, budget)
        results = finish(run)
        assert run.prompt_tokens == prompts
        assert run.response_tokens == sum(len(result.response_tokens) for result in results)


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


def test_weights_are_swapped_whole(
    new_engine: Callable[[], Engine], engine: Engine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, folder, seed=7)
    tasks = share(8, 2)
    before = generate(engine, tasks)
    engine.load(settings_of(folder), version(other, 1))
    swapped = generate(engine, tasks)
    fresh = new_engine()
    fresh.load(settings_of(folder), version(other, 1))
    assert swapped == generate(fresh, tasks) != before
    engine.load(settings_of(folder), version(folder))
    assert generate(engine, tasks) == before


def test_another_model_takes_the_place_of_the_first(
    new_engine: Callable[[], Engine], engine: Engine, tmp_path: Path, tiny_model: Path
) -> None:
    other = save_model(tmp_path, tiny_model, "mistral", hidden_size=64)
    generate(engine, share(2, 1))
    engine.load(settings_of(other), version(other))
    fresh = new_engine()
    fresh.load(settings_of(other), version(other))
    assert generate(engine, share(2, 1)) == generate(fresh, share(2, 1))


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
    assert generate(engine, share(2, 1)) == before


def test_an_adapter_is_swapped_on_its_backbone(new_engine: Callable[[], Engine], folder: Path, tmp_path: Path) -> None:
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
    assert generate(engine, share(4, 2)) == plain != adapted
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
    assert generate(engine, share(8, 2)) == before


def test_layers_without_keys_and_values_are_refused(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
) -> None:
    folder = save_model(tmp_path, tiny_model)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("full_attention", "linear_attention"))
    with pytest.raises(TaskError) as caught:
        new_engine().load(settings_of(folder), version(folder))
    assert caught.value.reason == "model_unloadable"


def test_a_model_without_scaled_dot_product_attention_is_refused(
    new_engine: Callable[[], Engine], tmp_path: Path, tiny_model: Path
) -> None:
    torch.manual_seed(0)
    BloomForCausalLM(BloomConfig(vocab_size=66, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / name)
    with pytest.raises(TaskError, match="needs a model with scaled dot-product attention; bloom has") as caught:
        new_engine().load(settings_of(tmp_path), version(tmp_path))
    assert caught.value.reason == "model_unloadable"


def test_running_out_of_memory_is_an_error_of_its_own(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    run = engine.start(share(2, 2), SAMPLING, None)
    monkeypatch.setattr(torch.nn.functional, "embedding", exhausted)
    with pytest.raises(TaskError, match="not enough memory") as caught:
        run.step()
    assert caught.value.reason == "out_of_memory"
    assert caught.value.retryable
