"""The functions' side of `rlhfless probe`: whole measurements on small models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from rlhfless_functions import artifacts
from rlhfless_functions.api.probe import ModelProbe, Probe, ProbedModel
from rlhfless_functions.serving.probe import probe
from rlhfless_functions.settings import DataSettings, LoraSettings
from rlhfless_functions.weights import load_policy, load_tokenizer, merge_adapter, publish_weights
from tests.generation.early_exit.models import deep, idle_behind, model_of
from tests.generation.engines.shares import settings_of, version
from tests.model.families import CAPPED, FAMILIES, save
from tests.weights.random_models import nudge, of_adapter

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1+2=" * count}) + "\n" for count in (1, 3, 2)))
    return file


def asked(folder: Path, data: Path, **changes: Any) -> Probe:
    given: dict[str, Any] = {
        "models": [ProbedModel(name="model", model=settings_of(folder))],
        "data": DataSettings(source=str(data)),
        "prompts": 3,
        "samples": 1,
        "temperature": 1.0,
        "max_prompt_tokens": 64,
        "max_response_tokens": 16,
        "seed": 0,
        "agreement": 0.9,
    }
    return Probe(**(given | changes))


def measured(folder: Path, data: Path, **changes: Any) -> ModelProbe:
    result = probe(asked(folder, data, **changes))
    assert result.error is None
    (found,) = result.models
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_probed_on_responses_of_its_own(
    family: str, data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    found = measured(save(FAMILIES[family], tmp_path / "model", tiny_model), data, draft=True)
    assert (found.layers, found.responses, len(found.exits)) == (2, 3, 1)
    last = found.by_layer[-1]
    # The pass over whole responses and the decoding agree on every draw.
    assert (last.drawn, last.greedy, last.settled) == (1.0, 1.0, 1.0)
    first = found.by_layer[0]
    assert 0 < first.probability < 1
    assert found.suitability == pytest.approx(first.settled / 2)
    assert found.decoded is not None
    assert (found.decoded.responses, found.decoded.identical) == (3, 3)
    assert found.decoded.tokens_per_pass >= 1


def test_idle_layers_are_found_and_drafts_are_all_kept(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = save(deep(), tmp_path / "model", tiny_model)
    idle_behind(model_of(deep()), 1).save_pretrained(folder, max_shard_size="30KB")
    found = measured(folder, data, draft=True, samples=2)
    assert found.responses == 6
    assert found.suitability == 0.75
    assert (found.skipped.layer, found.skipped.one_layer, found.skipped.by_confidence) == (1, 0.75, 0.75)
    assert found.decoded is not None
    assert found.best is not None
    assert found.decoded.identical == 6
    assert found.decoded.tokens_per_pass > min(2, found.best.drafts)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["whole", "adapter"])
def test_a_checkpoint_is_its_jobs_model_with_other_weights(
    lora: LoraSettings | None, data: Path, tiny_model: Path, tmp_path: Path
) -> None:
    model = settings_of(tiny_model, lora=lora)
    policy = load_policy(model, version(tiny_model))
    nudge(policy, lambda name: lora is None or of_adapter(name))
    with artifacts.publish(str(tmp_path / "checkpoint")) as folder:
        learnt = {name: each.detach() for name, each in policy.named_parameters() if each.requires_grad}
        save_file(learnt, folder / "policy.safetensors")
        (folder / "state.json").write_text('{"version": 3, "processes": 1}')
    whole = merge_adapter(policy) if isinstance(policy, PeftModel) else policy
    publish_weights(str(tmp_path / "whole"), whole, load_tokenizer(model, version(tiny_model)))
    made = ProbedModel(name="model", step=3, model=model, checkpoint=str(tmp_path / "checkpoint"))
    found, expected = measured(tiny_model, data, models=[made]), measured(tmp_path / "whole", data)
    assert found.step == 3
    assert (found.tokens, found.by_layer) == (expected.tokens, expected.by_layer)
    begun = measured(tiny_model, data, models=[made.model_copy(update={"checkpoint": None})])
    assert begun.by_layer == measured(tiny_model, data).by_layer != found.by_layer


def test_greedy_draws_are_the_likeliest(data: Path, tiny_model: Path) -> None:
    found = measured(tiny_model, data, temperature=0.0)
    assert all(layer.greedy == layer.drawn == layer.likeliest for layer in found.by_layer)


def test_a_model_of_one_layer_has_no_exit(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    found = measured(save(deep(1), tmp_path / "model", tiny_model), data, draft=True)
    assert (found.suitability, found.exits, found.best, found.pays, found.decoded) == (0.0, [], None, False, None)


def test_responses_are_as_long_as_the_model_has_room_for(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    folder = save(deep(), tmp_path / "model", tiny_model)  # 128 positions
    assert measured(folder, data, max_response_tokens=None, prompts=1).tokens <= 124
    found = probe(asked(folder, data, max_response_tokens=127))
    assert "lower sampling.maxPromptTokens or sampling.maxResponseTokens" in (found.error or "")


def test_what_cannot_be_probed_is_said_in_one_line(data: Path, tiny_model: Path, tmp_path: Path) -> None:
    def error(folder: Path, file: Path = data) -> str:
        said = probe(asked(folder, file)).error or ""
        assert "\n" not in said
        return said

    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "empty.jsonl is empty: give a dataset with at least one row" in error(tiny_model, empty)
    assert "data.source: " in error(tiny_model, tmp_path / "no.jsonl")
    untold = save(deep(), tmp_path / "untold", tiny_model)
    for file in untold.glob("tokenizer*"):
        file.unlink()
    assert "there is no tokenizer in it); give model.tokenizer" in error(untold)
    unheard = tmp_path / "unheard"
    unheard.mkdir()
    assert "give a Hugging Face folder with a config.json" in error(unheard)
    capped = save(CAPPED, tmp_path / "capped", tiny_model)
    assert "needs a model with scaled dot-product attention" in error(capped)
    broken = save(deep(), tmp_path / "broken", tiny_model)
    model = model_of(deep())
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    model.save_pretrained(broken, max_shard_size="30KB")
    assert "non-finite logits for prompt 0" in error(broken)
