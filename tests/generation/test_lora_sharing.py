"""Several jobs on one backbone, each with its adapter: what they share, and that nothing of one shows in another."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhfless_functions.api import GenerationRequest, WeightsReference
from rlhfless_functions.generation.engines.base import SequenceResult, SequenceTask
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.model.forward import collate, response_log_probs
from rlhfless_functions.preparation.models import PreparationModels
from rlhfless_functions.settings import LoraSettings, ModelSettings, SamplingSettings
from rlhfless_functions.weights import load_policy, merge_adapter, publish_adapter
from tests.generation.shares import make_request as make_request  # The fixtures.
from tests.generation.shares import prompts as prompts
from tests.generation.shares import run
from tests.training.whole_jobs import MakeJob, assert_equal_weights, final_weights, folder_of, run_job, train

torch.set_num_threads(1)

PROMPT, RESPONSE = [5, 6, 7, 8, 9], [20, 21, 22, 23]


# --- whole jobs --------------------------------------------------------------------------------------------------


def jobs_on(tiny_job: MakeJob, suffix: str) -> list[Path]:
    """Two jobs that have nothing in common but their backbone."""
    settings: list[dict[str, Any]] = [
        {"model": {"lora": {"rank": 4, "alpha": 16.0, "export": "adapter"}}, "seed": 1},
        {"model": {"lora": {"rank": 2, "targetModules": ["q_proj", "v_proj"], "export": "adapter"}}, "seed": 2},
    ]
    shared = {"steps": 2, "optimizer": {"learningRate": 1.0e-2}}
    return [tiny_job(f"job-{number}-{suffix}", **shared, **given) for number, given in enumerate(settings)]


def adapters_of(file: Path) -> list[dict[str, torch.Tensor]]:
    """The last version, and what is left for the user."""
    return [final_weights(file), load_file(folder_of(file) / "model" / "adapter_model.safetensors")]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
@pytest.mark.nightly
def test_two_jobs_trained_at_once_on_one_backbone_learn_what_each_learns_alone(
    tiny_job: MakeJob, tiny_model: Path
) -> None:
    alone, together = jobs_on(tiny_job, "alone"), jobs_on(tiny_job, "together")
    for file in alone:
        run_job(file)

    async def at_once() -> None:
        async with asyncio.TaskGroup() as group:
            for file in together:
                group.create_task(train(file))

    asyncio.run(at_once())
    for one, other in zip(alone, together, strict=True):
        for wanted, given in zip(adapters_of(one), adapters_of(other), strict=True):
            assert_equal_weights(given, wanted)
    assert adapters_of(alone[0])[-1].keys() != adapters_of(alone[1])[-1].keys()
    # Neither has made a copy of what they share.
    backbone = (tiny_model / "model.safetensors").stat().st_size
    for file in together:
        assert max(path.stat().st_size for path in folder_of(file).rglob("*.safetensors")) < backbone


# --- one instance ------------------------------------------------------------------------------------------------


def adapter(model: ModelSettings, to: Path, seed: int) -> WeightsReference:
    policy = load_policy(model, WeightsReference(version=0, uri=model.source))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    publish_adapter(str(to), policy)
    return WeightsReference(version=1, uri=model.source, adapter=str(to))


@pytest.fixture
def two_jobs(tiny_model: Path, tmp_path: Path) -> list[tuple[ModelSettings, WeightsReference]]:
    """Of different ranks and targets."""
    found = []
    for number, lora in enumerate((LoraSettings(rank=2), LoraSettings(rank=4, target_modules=["q_proj", "v_proj"]))):
        model = ModelSettings(source=str(tiny_model), dtype="float32", lora=lora)
        found.append((model, adapter(model, tmp_path / f"adapter-{number}", number)))
    return found


def scores(policy: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return response_log_probs(policy, collate([PROMPT], [RESPONSE], 0), 1.0)[0]


def test_an_engine_that_serves_two_jobs_in_turn_generates_what_each_does_alone(
    two_jobs: list[tuple[ModelSettings, WeightsReference]],
) -> None:
    def generate(engine: TransformersEngine, number: int) -> list[SequenceResult]:
        engine.load(*two_jobs[number])
        tasks = [SequenceTask(0, index, PROMPT, seed=index) for index in range(3)]
        run = engine.start(tasks, SamplingSettings(max_response_tokens=8), None)
        results = []
        while run.running or run.waiting:
            results += run.step()
        return sorted(results, key=lambda one: one.index)

    alone = [generate(TransformersEngine(), number) for number in range(2)]
    assert alone[0] != alone[1]
    shared = TransformersEngine()
    assert [generate(shared, number) for number in (0, 1, 1, 0)] == [alone[0], alone[1], alone[1], alone[0]]


def test_the_reference_of_both_jobs_is_the_model_that_was_given(
    two_jobs: list[tuple[ModelSettings, WeightsReference]], tiny_model: Path
) -> None:
    base = scores(AutoModelForCausalLM.from_pretrained(tiny_model))
    models = PreparationModels()
    for number in (0, 1, 0):
        model, weights = two_jobs[number]
        models.use(model)
        assert not torch.equal(scores(models.policy(weights)), base)
        with models.reference(WeightsReference(version=0, uri=model.source)) as reference:
            assert torch.equal(scores(reference), base)


# --- memory ------------------------------------------------------------------------------------------------------


def mapped_kilobytes(file: Path) -> dict[str, int]:
    """What this process has of a file in its memory, by the kernel's names of its kinds."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            inside = line.endswith(str(file))
        elif inside and rest[-1] == "kB":
            found[first[:-1]] = found.get(first[:-1], 0) + int(rest[0])
    return found


def test_the_backbone_is_the_files_own_pages_until_somebody_writes_to_them(
    two_jobs: list[tuple[ModelSettings, WeightsReference]], tmp_path: Path
) -> None:
    model, weights = two_jobs[0]
    file = Path(shutil.copytree(model.source, tmp_path / "model")) / "model.safetensors"
    model = model.model_copy(update={"source": str(file.parent)})
    content = file.read_bytes()
    policy = load_policy(model, weights.model_copy(update={"uri": model.source}))
    scores(policy)
    # What is not anonymous is the file cache's, of which there is one for all processes.
    used = mapped_kilobytes(file)
    assert used["Rss"] * 1024 >= 0.9 * len(content)
    assert used["Anonymous"] == 0
    assert {parameter.requires_grad for name, parameter in policy.named_parameters() if "lora_" not in name} == {False}
    merge_adapter(policy)
    assert mapped_kilobytes(file)["Anonymous"] > 0
    assert file.read_bytes() == content


def test_a_backbone_in_another_number_format_is_converted(
    two_jobs: list[tuple[ModelSettings, WeightsReference]], tmp_path: Path
) -> None:
    """In a folder of its own: models of other tests may have the others' files mapped still."""
    folder = Path(shutil.copytree(two_jobs[0][0].source, tmp_path / "model"))
    model = two_jobs[0][0].model_copy(update={"source": str(folder), "dtype": "bfloat16"})
    policy = load_policy(model, WeightsReference(version=0, uri=model.source))
    given = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert torch.equal(scores(policy), scores(given))
    assert mapped_kilobytes(folder / "model.safetensors").get("Rss", 0) == 0


# --- ahead of time -----------------------------------------------------------------------------------------------


def test_an_adapter_is_there_before_it_is_asked_for(
    two_jobs: list[tuple[ModelSettings, WeightsReference]], make_request: Callable[..., GenerationRequest]
) -> None:
    model, weights = two_jobs[0]
    generator = Generator()
    generator.preload(model, weights)
    # Nothing is left to be read.
    assert weights.adapter is not None
    shutil.rmtree(weights.adapter)
    assert run(make_request(model=model, weights=weights), generator).result.unfinished == 0


def test_a_preparer_that_was_started_for_an_adapter_has_policy_and_reference_in_one(
    two_jobs: list[tuple[ModelSettings, WeightsReference]], tiny_model: Path
) -> None:
    model, weights = two_jobs[0]
    models = PreparationModels()
    models.preload(model, weights)
    assert weights.adapter is not None
    shutil.rmtree(weights.adapter)
    base = scores(AutoModelForCausalLM.from_pretrained(tiny_model))
    assert not torch.equal(scores(models.policy(weights)), base)
    with models.reference(WeightsReference(version=0, uri=model.source)) as reference:
        assert torch.equal(scores(reference), base)
