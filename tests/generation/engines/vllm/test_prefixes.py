"""Shared prefixes whose keys and values one instance of vLLM computes and others read."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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
    return results, run.prompt_tokens, run.prefix_traffic()


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
    assert (run.prompt_tokens, run.response_tokens) == (0, 0)
    (tmp_path / "later").rename(file)
    assert_same({(result.prompt, result.index): result for result in finish(run)}, alone)
    assert run.prompt_tokens == everything - 480


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


def test_the_actors_of_a_job_compute_what_its_prompts_have_in_common_once(
    tiny_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = tiny_job(
        generation={"engine": "vllm", "sharePrefixes": True, "instances": {"min": 2, "max": 2}},
        sampling={"maxPromptTokens": 480},
        steps=2,
    )
    prompts = [{"prompt": 110 * "1+2=" + f"{number}=", "ground_truth": number} for number in range(8)]
    (job.parent / "train.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    run_to_its_end(job)
    folder = tmp_path / "runs" / "tiny"
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    first = records[0]["metrics"]
    assert first["generation/prefixes/tokens_sent"] == 384
    # On a busy machine the other instance may be there so much earlier that it has not waited.
    assert first["generation/prefixes/tokens_fetched"] in (0, 384)
    assert first["mismatch/mean_exp_abs"] < 1.01
    assert not (folder / "prefixes" / "step-000001").exists()
