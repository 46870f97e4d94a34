"""LoRA through the whole loop, and through instances that are shared: one backbone, many adapters."""

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.model.forward import collate, response_log_probs
from rlhfless_functions.preparation import models as preparation_models
from rlhfless_functions.preparation.models import PreparationModels
from rlhfless_functions.settings import LoraSettings, ModelSettings, SamplingSettings
from rlhfless_functions.weights import load_policy, publish_adapter
from tests.command_line import run_command
from tests.training.whole_jobs import (
    MakeJob,
    assert_same_final_weights,
    final_weights,
    folder_of,
    records_of,
    run_job,
    status_of,
)

torch.set_num_threads(1)

LORA = {"rank": 4, "alpha": 16.0}

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


# --- whole jobs --------------------------------------------------------------------------------------------------


def lora_job(tiny_job: MakeJob, name: str, **overrides: Any) -> Path:
    settings = {"model": {"lora": LORA}, "optimizer": {"learningRate": 1.0e-2}, **overrides}
    return tiny_job(name, **settings)


def test_a_job_trains_an_adapter_and_leaves_a_plain_model(tiny_job: MakeJob, tiny_model: Path) -> None:
    file = lora_job(tiny_job, "lora", steps=12, batch={"minibatchSamples": 16})
    run_job(file)
    records = records_of(file)
    rewards = [record["metrics"]["reward"] for record in records]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    assert max(tensor.abs().max() for name, tensor in final_weights(file).items() if "lora_B" in name) > 0
    model = AutoModelForCausalLM.from_pretrained(folder_of(file) / "model")
    given = AutoModelForCausalLM.from_pretrained(tiny_model)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(model.state_dict()[name], given.state_dict()[name])
    assert torch.equal(model.lm_head.weight, given.lm_head.weight)
    # The distance to the reference is that to the given model: none before anything has been learnt.
    assert records[0]["metrics"]["kl/reference"] == pytest.approx(0, abs=1e-6)
    assert records[-1]["metrics"]["kl/reference"] > 1e-4


def test_each_step_ships_the_adapter_alone_and_the_backbone_stays_where_it_is(
    tiny_job: MakeJob, tiny_model: Path
) -> None:
    file = lora_job(tiny_job, "lora", model={"lora": {"rank": 1, "targetModules": ["q_proj"]}}, steps=2)
    run_job(file)
    for version in (folder_of(file) / "weights").iterdir():
        assert not list(version.glob("model*.safetensors"))
    for record in records_of(file):
        assert record["metrics"]["weights/full_bytes"] == sum(
            tensor.nbytes for tensor in load_file(tiny_model / "model.safetensors").values()
        )
        assert record["metrics"]["weights/bytes"] < record["metrics"]["weights/full_bytes"] / 10
    status = status_of(file)
    assert status["weights"]["uri"] == str(tiny_model)


@pytest.mark.slow
def test_the_plan_does_not_change_the_adapter(tiny_job: MakeJob) -> None:
    one = lora_job(tiny_job, "one", generation={"instances": {"max": 1}}, steps=2)
    many = lora_job(tiny_job, "many", generation={"instances": {"min": 1, "max": 3}}, steps=2)
    for file in (one, many):
        run_job(file)
    assert_same_final_weights(many, one)


@pytest.mark.nightly
def test_a_job_that_is_killed_and_resumed_ends_with_the_same_adapter(tiny_job: MakeJob, tmp_path: Path) -> None:
    given = {"model": {"lora": {**LORA, "dropout": 0.2}}, "steps": 5, "checkpoints": {"everySteps": 2}}
    undisturbed = lora_job(tiny_job, "undisturbed", **given)
    run_job(undisturbed)
    file = lora_job(tiny_job, "killed", **given)
    with (tmp_path / "log.txt").open("ab") as log:
        for step in (2, 3):  # once behind a checkpoint, once at one
            driver = subprocess.Popen(run_command(file), stdout=log, stderr=log)
            deadline = time.monotonic() + 120
            while steps_of(file) < step and time.monotonic() < deadline:
                time.sleep(0.02)
            driver.kill()
            assert driver.wait() == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
        assert subprocess.run(run_command(file), stdout=log, stderr=log, check=False).returncode == 0
    assert [record["step"] for record in records_of(file)] == [1, 2, 3, 4, 5]
    assert_same_final_weights(file, undisturbed)


def steps_of(file: Path) -> int:
    """Steps that are written down, while the job may be about to write another."""
    place = folder_of(file) / "metrics.jsonl"
    return len(place.read_text().splitlines()) if place.exists() else 0


# --- one backbone, several adapters ------------------------------------------------------------------------------

PROMPT, RESPONSE = [5, 6, 7, 8, 9], [20, 21, 22, 23]


@pytest.fixture
def model(tiny_model: Path) -> ModelSettings:
    return ModelSettings(source=str(tiny_model), dtype="float32", lora=LoraSettings(rank=2))


@pytest.fixture
def versions(model: ModelSettings, tmp_path: Path) -> list[WeightsReference]:
    """The first versions of two jobs with equal settings: they differ in nothing but where they lie."""
    made = []
    for seed in (1, 2):
        policy = load_policy(model, WeightsReference(version=0, uri=model.source))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        uri = str(tmp_path / f"job-{seed}")
        publish_adapter(uri, policy)
        made.append(WeightsReference(version=1, uri=model.source, adapter=uri))
    return made


def scores(policy: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return response_log_probs(policy, collate([PROMPT], [RESPONSE], 0), 1.0)[0]


def test_two_jobs_adapters_never_mix_and_the_backbone_is_loaded_once(
    model: ModelSettings, versions: list[WeightsReference], tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initial = WeightsReference(version=0, uri=model.source)
    alone = [scores(load_policy(model, version)) for version in versions]
    base = scores(AutoModelForCausalLM.from_pretrained(tiny_model))
    assert not torch.equal(alone[0], alone[1])
    loads = []
    load = preparation_models.load_policy
    monkeypatch.setattr(preparation_models, "load_policy", lambda *given: loads.append(given) or load(*given))
    models = PreparationModels()
    models.use(model)
    for number in (0, 1, 0, 0, 1):
        assert torch.equal(scores(models.policy(versions[number])), alone[number])
        with models.reference(initial) as reference:
            assert torch.equal(scores(reference), base)
        assert torch.equal(scores(models.policy(versions[number])), alone[number])
    assert len(loads) == 1


def test_an_engine_that_serves_two_jobs_generates_with_the_adapter_asked_for(
    model: ModelSettings, versions: list[WeightsReference]
) -> None:
    def generate(engine: TransformersEngine, version: WeightsReference) -> list[list[float]]:
        engine.load(model, version)
        tasks = [SequenceTask(0, index, PROMPT, seed=index) for index in range(3)]
        run = engine.start(tasks, SamplingSettings(max_response_tokens=8), None)
        results = []
        while run.running or run.waiting:
            results += run.step()
        return [result.log_probs for result in sorted(results, key=lambda one: one.index)]

    alone = [generate(TransformersEngine(), version) for version in versions]
    assert alone[0] != alone[1]
    shared = TransformersEngine()
    assert [generate(shared, versions[number]) for number in (0, 1, 0)] == [alone[0], alone[1], alone[0]]
