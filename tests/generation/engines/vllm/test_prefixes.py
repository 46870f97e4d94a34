"""Shared prefixes whose keys and values one instance of vLLM computes and others read."""

import asyncio
import json
import random
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfless_functions import artifacts
from rlhfless_functions.api import (
    GenerationRequest,
    GenerationResult,
    SampleTask,
    SharedPrefixes,
    TaskKey,
)
from rlhfless_functions.api import SharedPrefix as SharedOnWire
from rlhfless_functions.data.prompts import Prompt, write_prompts
from rlhfless_functions.data.rollouts import read_rollouts
from rlhfless_functions.generation.engines.base import SequenceTask, SharedPrefix
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext
from rlhfless_functions.settings import EngineSettings, ModelSettings, SamplingSettings
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.local.local_run import run_locally
from tests.command_line import run_to_its_end
from tests.generation.engines.shares import (
    SAMPLING,
    Results,
    assert_same,
    continued,
    finish,
    generate,
    save_model,
    settings_of,
    version,
)
from tests.generation.engines.shares import folder as folder  # A fixture.

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.engine import VllmEngine

torch.set_num_threads(1)


def random_tokens(seed: int, count: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(2, 66) for _ in range(count)]


COMMON = random_tokens(0, 500)


def sharing_tasks(shared: SharedPrefix | None) -> list[SequenceTask]:
    """Two samples of each of three prompts that begin alike."""
    return [
        SequenceTask(row, index, COMMON + random_tokens(1 + row, 40), seed=10 * row + index, prefix=shared)
        for row in range(3)
        for index in range(2)
    ]


@pytest.fixture(scope="module")
def sharing() -> Iterator[VllmEngine]:
    """One instance stands for all: its own cache is emptied in between."""
    engine = VllmEngine(EngineSettings(kv_budget_tokens=8192, sequence_tokens=1024, share_prefixes=True))
    yield engine
    engine.close()


def forget(engine: VllmEngine) -> None:
    assert engine._loaded is not None
    assert engine._loaded.engine.reset_prefix_cache()


def shared_run(engine: VllmEngine, shared: SharedPrefix) -> tuple[Results, int, dict[str, float]]:
    """What a share came to, the prompt tokens that were computed for it, and what was sent and fetched."""
    run = engine.start(sharing_tasks(shared), SAMPLING, None)
    results = {(result.prompt, result.index): result for result in finish(run)}
    return results, run.computed.prompt, run.prefix_traffic()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_that_another_instance_computed_is_read_and_nothing_changes(
    sharing: VllmEngine, folder: Path, tmp_path: Path, dtype: Any
) -> None:
    """480 of its 500 tokens, as blocks have 32."""
    model = ModelSettings(source=str(folder), dtype=dtype)
    sharing.load(model, version(folder))
    alone = generate(sharing, sharing_tasks(None))
    wanted = {}
    for source in (True, False):
        forget(sharing)
        results, computed, traffic = shared_run(sharing, SharedPrefix(500, str(tmp_path), source, 30.0))
        assert_same(results, alone)
        wanted[source] = computed
        (file,) = tmp_path.iterdir()
        size = sum(tensor.nbytes for tensor in load_file(file).values())
        kv_numbers = 2 * 2 * 2 * 32  # keys and values, layers, heads, and a head's size
        assert size == 480 * kv_numbers * (4 if dtype == "float32" else 2)
        assert (traffic["bytes_sent"], traffic["bytes_fetched"]) == ((size, 0) if source else (0, size))
    assert wanted[True] - wanted[False] == 480


def test_a_prefix_goes_through_a_store_that_instances_do_not_see_as_a_folder(sharing: VllmEngine, folder: Path) -> None:
    """480 tokens are sent in one object. What waits for it does other work, and no thread of the engine."""
    sharing.load(settings_of(folder), version(folder))
    alone = generate(sharing, sharing_tasks(None))
    uri = f"memory://{uuid.uuid4().hex}/prefixes"
    forget(sharing)
    reader = sharing.start(sharing_tasks(SharedPrefix(500, uri, False, 3600.0)), SAMPLING, None)
    for _ in range(20):
        assert reader.step() == []
    reader.abort()
    forget(sharing)
    source = sharing.start(sharing_tasks(SharedPrefix(500, uri, True, 0.0)), SAMPLING, None)
    results = {(result.prompt, result.index): result for result in finish(source)}
    source.close()
    sent = source.prefix_traffic()
    assert_same(results, alone)
    assert len(artifacts.list_files(uri)) == 1
    forget(sharing)
    reader = sharing.start(sharing_tasks(SharedPrefix(500, uri, False, 3600.0)), SAMPLING, None)
    assert_same({(result.prompt, result.index): result for result in finish(reader)}, alone)
    reader.close()
    assert source.computed.prompt - reader.computed.prompt == 480
    fetched = reader.prefix_traffic()
    assert (sent["tokens_sent"], fetched["tokens_fetched"]) == (480, 480)
    assert sent["seconds_sent"] > 0 == sent["seconds_fetched"]
    assert fetched["seconds_fetched"] > 0 == fetched["seconds_sent"]


def test_a_model_whose_layers_see_a_window_shares_nothing(folder: Path, tmp_path: Path) -> None:
    """vLLM drops blocks that the window has left behind. They can't be sent."""
    window = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}
    windowed = save_model(tmp_path / "windowed", folder, max_position_embeddings=1024, **window)
    engine = VllmEngine(EngineSettings(kv_budget_tokens=8192, sequence_tokens=1024, share_prefixes=True))
    engine.load(settings_of(windowed), version(windowed))
    alone = generate(engine, sharing_tasks(None))
    forget(engine)
    run = engine.start(sharing_tasks(SharedPrefix(500, str(tmp_path / "prefixes"), True, 0.0)), SAMPLING, None)
    assert_same({(result.prompt, result.index): result for result in finish(run)}, alone)
    assert run.prefix_traffic() == {}
    assert not (tmp_path / "prefixes").exists()
    engine.close()


def test_a_prefix_is_waited_for_but_not_for_ever(sharing: VllmEngine, folder: Path, tmp_path: Path) -> None:
    sharing.load(settings_of(folder), version(folder))
    alone = generate(sharing, sharing_tasks(None))
    forget(sharing)
    results, everything, _ = shared_run(sharing, SharedPrefix(500, str(tmp_path), False, 0.05))
    assert_same(results, alone)
    forget(sharing)
    shared_run(sharing, SharedPrefix(500, str(tmp_path), True, 0.0))
    (file,) = tmp_path.iterdir()
    file.rename(tmp_path / "later")
    forget(sharing)
    run = sharing.start(sharing_tasks(SharedPrefix(500, str(tmp_path), False, 3600.0)), SAMPLING, None)
    for _ in range(20):
        assert run.step() == []
    assert (run.computed.prompt, run.computed.response) == (0, 0)
    assert run.prefix_traffic()["seconds_waited"] > 0
    (tmp_path / "later").rename(file)
    assert_same({(result.prompt, result.index): result for result in finish(run)}, alone)
    assert run.computed.prompt == everything - 480


@pytest.mark.parametrize("fault", ["cut short", "of another model"])
def test_a_prefix_that_cannot_be_read_is_computed(
    sharing: VllmEngine, folder: Path, tmp_path: Path, fault: str
) -> None:
    sharing.load(settings_of(folder), version(folder))
    alone = generate(sharing, sharing_tasks(None))
    forget(sharing)
    shared_run(sharing, SharedPrefix(500, str(tmp_path), True, 0.0))
    (file,) = tmp_path.iterdir()
    if fault == "cut short":
        file.write_bytes(file.read_bytes()[:-1000])
    else:
        save_file({name: tensor[..., :8].contiguous() for name, tensor in load_file(file).items()}, file)
    forget(sharing)
    results, _, traffic = shared_run(sharing, SharedPrefix(500, str(tmp_path), False, 0.0))
    assert_same(results, alone)
    assert traffic["bytes_fetched"] == 0


def test_a_prefix_of_other_weights_is_not_taken_and_a_cut_share_goes_on_with_its_own(
    sharing: VllmEngine, folder: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", folder, seed=7, max_position_embeddings=1024)
    prefix = SharedPrefix(500, str(tmp_path / "prefixes"), True, 0.0)
    sharing.load(settings_of(folder), version(folder))
    shared_run(sharing, prefix)
    sharing.load(settings_of(folder), version(other, 1))
    alone = generate(sharing, sharing_tasks(None))
    forget(sharing)
    run = sharing.start(sharing_tasks(prefix), SAMPLING, None)
    for _ in range(5):
        run.step()
    tasks = continued(sharing_tasks(prefix), run.unfinished())
    assert run.prefix_traffic()["bytes_fetched"] == 0
    assert len(list((tmp_path / "prefixes").iterdir())) == 2
    run.abort()
    forget(sharing)
    resumed = sharing.start(tasks, SAMPLING, None)
    assert_same({(result.prompt, result.index): result for result in finish(resumed)}, alone)
    assert resumed.prefix_traffic()["bytes_fetched"] > 0


def test_actors_of_a_step_share_what_their_requests_say(folder: Path, tmp_path: Path) -> None:
    """Also with one that generates with transformers, and computes everything itself."""
    rows = [Prompt(row=row, tokens=COMMON + random_tokens(1 + row, 40), text="") for row in range(4)]
    write_prompts(str(tmp_path / "prompts.parquet"), rows)
    sharing = Generator(VllmEngine(EngineSettings(kv_budget_tokens=8192, sequence_tokens=1024, share_prefixes=True)))

    def run(generator: Generator, name: str, row: int, *, source: bool | None) -> GenerationResult:
        shared = None
        if source is not None:
            given = SharedOnWire(prompt=row, tokens=500, source=source)
            shared = SharedPrefixes(folder=str(tmp_path / "prefixes"), prefixes=[given])
        request = GenerationRequest(
            key=TaskKey(job_uid="job", step=1, stage="generation", part=name, attempt=0),
            result=str(tmp_path / f"{name}.json"),
            model=settings_of(folder),
            weights=version(folder),
            prompts=str(tmp_path / "prompts.parquet"),
            samples=[SampleTask(prompt=row, index=index) for index in range(3)],
            sampling=SamplingSettings(max_prompt_tokens=600, max_response_tokens=24),
            seed=0,
            sink=str(tmp_path / name),
            shared_prefixes=shared,
        )
        return generator.run(request, TaskContext(emit=lambda event: None))

    def responses(result: GenerationResult) -> dict[tuple[int, int], list[int]]:
        return {key: rollout.response_tokens for key, rollout in read_rollouts(result.parts).items()}

    plain = Generator(TransformersEngine())
    alone = run(plain, "alone", 1, source=None)
    assert run(plain, "told", 1, source=False).shared_prefixes == {}
    first = run(sharing, "first", 0, source=True)
    assert first.shared_prefixes["bytes_sent"] > 0
    assert first.shared_prefixes["bytes_fetched"] == 0
    # The same instance has it in its own cache: another one does not.
    engine = sharing._given
    assert isinstance(engine, VllmEngine)
    forget(engine)
    second = run(sharing, "second", 1, source=False)
    assert second.shared_prefixes["bytes_fetched"] == first.shared_prefixes["bytes_sent"]
    assert second.prompt_tokens < first.prompt_tokens - 400
    assert responses(second) == responses(alone)
    engine.close()


def write_prompts_with(file: Path, prefixes: int, count: int = 16) -> None:
    """Prompts that begin in turns with each prefix: each half of them, an actor's share, has all."""
    beginnings = [110 * f"{number}+2=" for number in range(prefixes)]
    prompts = [
        {"prompt": f"{beginnings[number % prefixes]}{number}=", "ground_truth": number} for number in range(count)
    ]
    file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))


TWO_ACTORS = {
    "sampling": {"maxPromptTokens": 480, "maxResponseTokens": 4},
    "data": {"source": "train.jsonl", "shuffle": False},
    "batch": {"promptsPerStep": 16, "samplesPerPrompt": 2},
    "steps": 2,
}


def generation(**settings: Any) -> dict[str, Any]:
    return {"engine": "vllm", "instances": {"min": 2, "max": 2}, "keepAlive": "10m", **settings}


def records_of(uri: str) -> list[dict[str, Any]]:
    lines = artifacts.read_bytes(artifacts.join(uri, "metrics.jsonl")).splitlines()
    return [json.loads(line) for line in lines]


def test_the_actors_of_a_job_compute_prefixes_once_where_that_pays(
    tiny_job: Callable[..., Path], tmp_path: Path
) -> None:
    """No user has to ask for it."""
    job = tiny_job(**TWO_ACTORS, generation=generation())
    write_prompts_with(job.parent / "train.jsonl", prefixes=8)
    run_to_its_end(job)
    folder = tmp_path / "runs" / "tiny"
    first, second = records_of(str(folder))
    assert first["plan"]["prefixes"].startswith("yes: step 1 can save ")
    assert first["metrics"]["generation/prefixes/tokens_sent"] == 8 * 384
    # On a busy machine the other instance may be there so much earlier that it has not waited.
    assert 0 <= first["metrics"]["generation/prefixes/tokens_fetched"] <= 8 * 384
    assert first["metrics"]["mismatch/mean_exp_abs"] < 1.01
    assert "step 2 can save " in second["plan"]["prefixes"]
    assert not (folder / "prefixes" / "step-000001").exists()


def test_the_actors_of_a_job_with_an_object_store_share_prefixes(tiny_job: Callable[..., Path], s3: str) -> None:
    job = tiny_job(**{**TWO_ACTORS, "steps": 1}, generation=generation(sharePrefixes="always"))
    write_prompts_with(job.parent / "train.jsonl", prefixes=2)
    asyncio.run(run_locally(load_job(job).resolve_paths(job.parent), f"{s3}/runs", threads=1))
    (record,) = records_of(f"{s3}/runs")
    assert record["plan"]["prefixes"] == "always, by generation.sharePrefixes"
    assert record["metrics"]["generation/prefixes/tokens_sent"] == 2 * 384
    assert record["metrics"]["mismatch/mean_exp_abs"] < 1.01
    assert not any("/prefixes/step-000001/" in uri for uri in artifacts.list_files(f"{s3}/runs"))
