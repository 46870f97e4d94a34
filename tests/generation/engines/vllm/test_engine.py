"""The engine on vLLM: what it promises beyond what every engine does, and what vLLM would do wrong if it were let."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlhfless_functions.api import (
    EngineRoom,
    Event,
    GenerationRequest,
    Partial,
    SampleTask,
    TaskKey,
    WeightsReference,
)
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.generation.engines.base import NonFiniteLogitsError, SequenceTask
from rlhfless_functions.generation.engines.choice import choose_engine
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import EngineSettings, LoraSettings, ModelSettings, SamplingSettings, VllmSettings
from rlhfless_functions.weights import publish_weights
from tests.generation.engines.shares import (
    SAMPLING,
    assert_same,
    continued,
    finish,
    generate,
    long_prompt,
    published_adapter,
    reference_log_probs,
    save_model,
    settings_of,
    share,
    version,
)
from tests.generation.engines.shares import folder as folder  # A fixture.
from tests.generation.shares import Outcome, run, run_and_kill

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.arguments import CPU_BLOCK_TOKENS
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine

torch.set_num_threads(1)

_kept: list[VllmEngine] = []


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    for engine in _kept:
        engine.close()
    _kept.clear()


@pytest.fixture
def engine(folder: Path) -> VllmEngine:
    """One for all tests that need no fresh one: vLLM takes a while to start."""
    if not _kept:
        _kept.append(VllmEngine(EngineSettings(kv_budget_tokens=8192, sequence_tokens=1024)))
    _kept[0].load(settings_of(folder), version(folder))
    return _kept[0]


def refusal(folder: Path, **changes: Any) -> TaskError:
    """What loading says with such settings."""
    engine = VllmEngine(EngineSettings(**changes))
    with pytest.raises(TaskError) as caught:
        engine.load(settings_of(folder), version(folder))
    return caught.value


# --- samples -----------------------------------------------------------------------------------------------------


def test_prompts_that_are_prefilled_in_chunks_are_sampled_as_any_other(engine: VllmEngine, folder: Path) -> None:
    """A seed of vLLM's own is an error there on a CPU, and its generator would repeat itself after a cut."""
    tasks = [SequenceTask(prompt, 0, long_prompt(prompt, 900), seed=prompt) for prompt in range(4)]
    reference = TransformersEngine()
    reference.load(settings_of(folder), version(folder))
    assert_same(generate(engine, tasks), generate(reference, tasks))


def test_a_response_that_one_engine_began_goes_on_with_the_other(engine: VllmEngine, folder: Path) -> None:
    tasks = share(8, 2)
    whole = generate(engine, tasks)
    other = TransformersEngine()
    other.load(settings_of(folder), version(folder))
    for first, second in ((engine, other), (other, engine)):
        run = first.start(tasks, SAMPLING, None)
        done = {(result.prompt, result.index): result for _ in range(7) for result in run.step()}
        rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
        assert_same(done | generate(second, rest), whole)


def test_a_group_computes_its_prompt_once_and_the_next_run_finds_it(engine: VllmEngine) -> None:
    tasks = [SequenceTask(100, index, long_prompt(100, 320), seed=index) for index in range(8)]
    run = engine.start(tasks, SAMPLING, None)
    finish(run)
    assert 320 <= run.computed.prompt <= 320 + 7 * 32
    again = engine.start(tasks, SAMPLING, None)
    finish(again)
    assert again.computed.prompt <= 8 * 32


def test_a_run_that_is_cut_finds_its_contexts_in_the_next(engine: VllmEngine) -> None:
    """All but the block that each sample was in: what a receiver of moved samples loses is no prefill of its own."""
    block = 32
    tasks = [SequenceTask(200 + row, 0, long_prompt(200 + row, 64), seed=row) for row in range(16)]
    sampling = SamplingSettings(max_prompt_tokens=64, max_response_tokens=120)
    run = engine.start(tasks, sampling, None)
    ended = {(result.prompt, result.index) for _ in range(60) for result in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in ended], run.unfinished())
    contexts = sum(len(task.prompt_tokens) + len(task.response_tokens) for task in rest)
    again = engine.start(rest, sampling, None)
    finish(again)
    assert contexts > 3 * block * len(rest) > 0
    assert again.computed.prompt <= block * len(rest)
    moved = [SequenceTask(300, 0, long_prompt(300, 64), seed=0)]
    whole = engine.start([*rest, *moved], sampling, None)
    finish(whole)
    assert whole.computed.prompt <= block * len(rest) + 64, "only what was moved here is computed"


def test_a_group_that_comes_back_after_a_swap_is_computed_anew(
    engine: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, folder, seed=7, max_position_embeddings=1024)
    tasks = [SequenceTask(101, index, long_prompt(101, 320), seed=index) for index in range(2)]
    generate(engine, tasks)
    engine.load(settings_of(folder), version(other, 1))
    run = engine.start(tasks, SAMPLING, None)
    results = finish(run)
    assert run.computed.prompt >= 320
    for result in results:
        expected = reference_log_probs(other, tasks[result.index], result.response_tokens, 1.0)
        assert result.log_probs == pytest.approx(expected, abs=2e-4)


def test_sequences_that_outgrow_the_cache_are_preempted_and_none_is_lost(folder: Path) -> None:
    engine = VllmEngine(EngineSettings(kv_budget_tokens=256, sequence_tokens=192))
    engine.load(settings_of(folder), version(folder))
    sampling = SamplingSettings(max_prompt_tokens=64, max_response_tokens=120)
    # A block may be left over.
    assert engine.start(share(1, 1), sampling, None).room.kv_tokens in (256, 256 + CPU_BLOCK_TOKENS)
    assert engine.start(share(1, 1), sampling, 192).room == EngineRoom(sequences=1, kv_tokens=192)
    crowded = generate(engine, share(8, 3), sampling)
    roomy = TransformersEngine()
    roomy.load(settings_of(folder), version(folder))
    assert_same(crowded, generate(roomy, share(8, 3), sampling))


@pytest.mark.parametrize("keep", [False, True])
def test_weights_that_gave_nan_leave_none_in_the_blocks_of_others(
    engine: VllmEngine, folder: Path, tmp_path: Path, keep: bool
) -> None:
    """Attention multiplies what an unfinished block holds beyond its sequence by zero, and NaN stays NaN."""
    tasks = [replace(task, prompt_tokens=long_prompt(task.prompt, 40)) for task in share(64, 6)]
    before = generate(engine, tasks)
    poisoned = shutil.copytree(folder, tmp_path / "poisoned")
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][65] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    engine.load(settings_of(folder), version(poisoned, 1))
    nan = [SequenceTask(prompt, 0, [65] * 900, prompt) for prompt in range(8)]
    with pytest.raises(NonFiniteLogitsError):
        finish(engine.start(nan, SAMPLING, None, keep_kv_cache=keep))
    engine.load(settings_of(folder), version(folder))
    run = engine.start(tasks, SAMPLING, None, keep_kv_cache=keep)
    assert_same({(result.prompt, result.index): result for result in finish(run)}, before)


def test_a_temperature_that_vllm_would_change_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(TaskError, match=r"sampling.temperature \(0.001\) is below 0.01") as caught:
        engine.start(share(1, 1), SAMPLING.model_copy(update={"temperature": 0.001}), None)
    assert caught.value.reason == "bad_request"


# --- settings ----------------------------------------------------------------------------------------------------


def test_vllms_own_settings_reach_it(folder: Path) -> None:
    vllm = VllmSettings(max_model_len=96, extra_args={"max-num-seqs": 3, "max_num_batched_tokens": 128})
    engine = VllmEngine(EngineSettings(vllm=vllm))
    engine.load(settings_of(folder), version(folder))
    run = engine.start(share(8, 1), SAMPLING, None)
    while run.running or run.waiting:
        run.step()
        assert run.running <= 3
    with pytest.raises(TaskError, match=r"prompt 0 has 90 tokens.*model's 96 positions"):
        engine.start([SequenceTask(0, 0, [2] * 90, seed=0)], SAMPLING, None)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("max_model_len", "can't be set here; set generation.vllm.maxModelLen instead"),
        ("logprobs_mode", "can't be set, because samples depend on it"),
        ("max_num_sequences", "is not an argument of this version of vLLM"),
    ],
)
def test_an_argument_that_is_not_for_the_job_to_give_is_refused(folder: Path, argument: str, said: str) -> None:
    error = refusal(folder, vllm=VllmSettings(extra_args={argument: 1}))
    assert error.reason == "bad_request"
    assert f"generation.vllm.extraArgs: {argument} {said}" in str(error)


def test_a_budget_without_room_for_one_sequence_is_refused_before_anything_is_loaded(folder: Path) -> None:
    error = refusal(folder, kv_budget_tokens=100, sequence_tokens=128)
    assert error.reason == "bad_request"
    assert "generation.kvBudgetTokens (100) is too small for a sequence of 128 tokens" in str(error)


def test_a_model_that_vllm_cannot_load_is_named_and_the_engine_is_usable_afterwards(
    tmp_path: Path, tiny_model: Path, folder: Path
) -> None:
    mixed = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    bad = save_model(tmp_path, tiny_model, **mixed)
    engine = VllmEngine()
    with pytest.raises(TaskError, match=r"cannot be loaded.*set generation.engine to transformers") as caught:
        engine.load(settings_of(bad), version(bad))
    assert caught.value.reason == "model_unloadable"
    assert str(bad) in str(caught.value)
    engine.load(settings_of(folder), version(folder))
    assert generate(engine, share(1, 1))


def test_an_adapter_is_there_before_it_is_asked_for(
    make_request: Callable[..., GenerationRequest], folder: Path, tmp_path: Path
) -> None:
    model = settings_of(folder, lora=LoraSettings(rank=4))
    weights = version(folder, 1, str(published_adapter(folder, tmp_path / "adapter")))
    settings = EngineSettings(name="vllm", kv_budget_tokens=8192, sequence_tokens=1024)
    generator = Generator(settings=settings)
    generator.preload(model, weights)
    # Nothing is left to be read.
    assert weights.adapter is not None
    shutil.rmtree(weights.adapter)
    request = make_request("preloaded", model=model, weights=weights, engine=settings)
    assert generator.run(request, TaskContext(emit=lambda event: None)).unfinished == 0


def test_vllm_is_chosen_where_it_is_installed_and_says_why(folder: Path) -> None:
    choice = choose_engine(EngineSettings(), settings_of(folder))
    assert choice.name == "vllm"
    assert "is installed and supports the device" in str(choice)


# --- when it fails -----------------------------------------------------------------------------------------------


def test_another_engine_in_the_process_ends_the_first(engine: VllmEngine, folder: Path) -> None:
    second = VllmEngine()
    second.load(settings_of(folder), version(folder))
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(1, 1), SAMPLING, None)
    assert generate(second, share(1, 1))


def test_a_reload_that_fails_half_way_is_the_end_of_the_engine(
    engine: VllmEngine, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then holds a mixture without a way back: here it meets a tensor that the check would have refused."""
    other = save_model(tmp_path, folder, seed=7, max_position_embeddings=1024)
    weights = load_file(other / "model.safetensors")
    weights["model.layers.7.mlp.down_proj.weight"] = torch.zeros(32, 64)
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    before = generate(engine, share(2, 1))
    with pytest.raises(TaskError, match=r"unknown: model.layers.7.mlp"):
        engine.load(settings_of(folder), version(other, 1))
    monkeypatch.setattr("rlhfless_functions.generation.engines.vllm.engine.layout_difference", lambda *_, **__: "")
    with pytest.raises(TaskError, match=r"vLLM failed while it took over weights version 1") as caught:
        engine.load(settings_of(folder), version(other, 1))
    assert (caught.value.reason, caught.value.retryable) == ("engine_lost", True)
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(1, 1), SAMPLING, None)
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(2, 1)), before)


def test_weights_of_another_shape_are_refused_though_vllm_would_take_them(
    engine: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path, folder, seed=7, max_position_embeddings=1024, intermediate_size=96)
    before = generate(engine, share(2, 1))
    with pytest.raises(TaskError, match=r"of another shape: model.layers.0.mlp") as caught:
        engine.load(settings_of(folder), version(other, 1))
    assert caught.value.reason == "model_unloadable"
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(2, 1)), before)


def test_weights_that_do_not_match_their_checksums_are_never_sampled_from(
    engine: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    before = generate(engine, share(2, 2))
    bad = tmp_path / "bad"
    publish_weights(
        str(bad), AutoModelForCausalLM.from_pretrained(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    )
    content = bytearray((bad / "model.safetensors").read_bytes())
    content[-100] ^= 1
    (bad / "model.safetensors").write_bytes(content)
    with pytest.raises(TaskError, match=r"bad"):
        engine.load(settings_of(folder), version(bad, 1))
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(1, 1), SAMPLING, None)
    engine.load(settings_of(folder), version(folder))
    assert_same(generate(engine, share(2, 2)), before)


PROMPTS, GROUP = 4, 3


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("data") / "prompts.parquet")
    write_prompts(uri, [Prompt(row=row, tokens=long_prompt(row, 5 + 9 * row), text="") for row in range(PROMPTS)])
    return uri


@pytest.fixture
def make_request(folder: Path, prompts: str, tmp_path: Path) -> Callable[..., GenerationRequest]:
    def make(sink: str, **changes: Any) -> GenerationRequest:
        request = GenerationRequest(
            key=TaskKey(job_uid="job", step=3, stage="generation", part="share-0", attempt=0),
            result=str(tmp_path / f"{sink}.json"),
            model=ModelSettings(source=str(folder), dtype="float32"),
            weights=WeightsReference(version=2, uri=str(folder)),
            prompts=prompts,
            samples=[SampleTask(prompt=prompt, index=i) for prompt in range(PROMPTS) for i in range(GROUP)],
            sampling=SamplingSettings(max_prompt_tokens=50, max_response_tokens=200),
            seed=11,
            sink=str(tmp_path / sink),
        )
        return request.model_copy(update=changes)

    return make


def responses(outcome: Outcome) -> dict[tuple[int, int], list[int]]:
    return {key: rollout.response_tokens for key, rollout in outcome.finished().items()}


def test_an_engine_that_dies_has_published_what_it_sampled_and_another_one_goes_on(
    engine: VllmEngine, make_request: Callable[..., GenerationRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = Generator(engine)
    whole = run(make_request("whole"), generator)
    assert engine._loaded is not None
    real, steps = engine._loaded.engine.step, 0

    def dying() -> Any:
        nonlocal steps
        steps += 1
        if steps > 50:
            raise RuntimeError("the device fell off the bus")
        return real()

    monkeypatch.setattr(engine._loaded.engine, "step", dying)
    events: list[Event] = []
    first = make_request("first")
    with pytest.raises(TaskError, match="the device fell off the bus") as caught:
        generator.run(first, TaskContext(emit=events.append))
    assert (caught.value.reason, caught.value.retryable) == ("engine_lost", True)
    assert any(isinstance(event, Partial) for event in events)
    monkeypatch.undo()
    rest = run(make_request("second", resume_from=[first.sink]), Generator(TransformersEngine()))
    assert rest.result.unfinished == 0
    # The dying engine's steps are not sampled again.
    assert rest.result.response_tokens <= whole.result.response_tokens - 50
    assert responses(rest) == responses(whole)


def test_a_process_that_is_killed_loses_no_more_than_its_last_moments(
    engine: VllmEngine, make_request: Callable[..., GenerationRequest]
) -> None:
    generator = Generator(engine)
    whole = run(make_request("undisturbed"), generator)
    request = make_request("killed", flush_seconds=1e-6, engine=EngineSettings(name="vllm"))
    run_and_kill(request, events=3)
    rest = run(make_request("next", resume_from=[request.sink]), generator)
    assert rest.result.response_tokens < whole.result.response_tokens
    assert responses(rest) == responses(whole)
