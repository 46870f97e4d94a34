"""`rlhfless probe`: models, checkpoints and runs, as a user names them."""

import json
import shutil
from html import escape
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rlhfless_functions import artifacts
from rlhfless_functions.api.probe import ProbeResult
from rlhfless_operator import cli
from rlhfless_operator.errors import UserError
from rlhfless_operator.local.probe import in_options, make_probe
from rlhfless_operator.local.probe_view import probe_page, verdict
from tests.training.whole_jobs import MakeJob

pytestmark = pytest.mark.usefixtures("warm_start")

GIVEN: dict[str, Any] = {
    "data": None, "prompt_column": None, "tokenizer": None, "dtype": None, "temperature": None,
    "max_prompt_tokens": None, "max_tokens": None,
    "prompts": 1, "samples": 1, "seed": 0, "agreement": 0.9, "draft": False, "threads": None,
}  # fmt: skip
SMALL = ("--prompts", "2", "--max-tokens", "8", "--threads", "1")


def said(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["probe", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["probe", *arguments])
    assert isinstance(result.exception, UserError), result.output
    message = str(result.exception)
    assert "\n" not in message
    return message


def probed(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return found


@pytest.fixture
def run(tiny_job: MakeJob, tiny_model: Path, tmp_path: Path) -> Path:
    """A run with two checkpoints; with the second one, training has come to the model that it began with."""
    folder = tmp_path / "run"
    folder.mkdir()
    document = yaml.safe_load(tiny_job().read_text())
    document["spec"]["data"]["source"] = str(tmp_path / "tiny" / "train.jsonl")
    document["spec"]["sampling"] |= {"temperature": 0.7, "maxResponseTokens": 12}
    (folder / "job.yaml").write_text(yaml.safe_dump(document))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for step, scale in ((2, 3.0), (10, 1.0)):
        with artifacts.publish(str(folder / "checkpoints" / f"step-{step:06d}")) as files:
            tensors = {name: (scale * tensor).detach().contiguous() for name, tensor in model.named_parameters()}
            save_file(tensors, files / "policy.safetensors")
            (files / "state.json").write_text(json.dumps({"version": step, "processes": 1}))
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1+2="}\n{"prompt": "3+4="}\n')
    return file


@pytest.mark.slow
def test_a_model_is_measured_and_shown(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    page = tmp_path / "probe.html"
    found = probed(str(tiny_model), "--data", str(prompts), "--draft", "--html", str(page), *SMALL)
    (model,) = found["models"]
    assert (model["name"], model["step"], model["layers"], model["responses"]) == (str(tiny_model), None, 2, 2)
    assert (found["device"], found["threads"]) == ("cpu", 1)
    assert [layer["layer"] for layer in model["by_layer"]] == [1, 2]
    assert model["decoded"]["identical"] == 2
    text = page.read_text()
    assert text.count("<figure>") == 2
    assert escape(verdict(ProbeResult.model_validate(found).models[0])) in text
    assert "<script" not in text


@pytest.mark.nightly
def test_tables_are_shown_without_json(tiny_model: Path, prompts: Path) -> None:
    table = said(str(tiny_model), "--data", str(prompts), *SMALL)
    assert "suitability" in table
    assert "early-exit drafting" in table


@pytest.mark.slow
def test_a_run_is_its_first_model_and_its_checkpoints_by_step(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "probe.html"
    found = probed(str(run), "--prompts", "2", "--threads", "1", "--html", str(page))
    first, changed, last = found["models"]
    assert [each["step"] for each in found["models"]] == [0, 2, 10]
    names = ("tokens", "suitability", "skipped", "by_layer")
    assert [first[name] for name in names] == [last[name] for name in names]
    assert first["by_layer"] != changed["by_layer"]
    assert page.read_text().count("<figure>") == 3 + 2 * 2


def test_checkpoints_are_named_alone_too(run: Path) -> None:
    names = sorted(str(folder) for folder in (run / "checkpoints").iterdir())
    asked = make_probe(names, **GIVEN)
    assert [each.step for each in asked.models] == [2, 10]
    assert asked.data.source.endswith("train.jsonl")
    assert (asked.temperature, asked.max_response_tokens, asked.max_prompt_tokens) == (0.7, 12, 16)
    changed = make_probe(names[:1], **GIVEN | {"temperature": 0.0, "max_tokens": 5, "dtype": "bfloat16"})
    assert (changed.temperature, changed.max_response_tokens) == (0.0, 5)
    assert changed.models[0].model.dtype == "bfloat16"


def test_a_published_version_has_the_step_of_its_name(tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step-000007"
    shutil.copytree(tiny_model, folder)
    (found,) = make_probe([str(folder)], **GIVEN | {"data": "x.jsonl"}).models
    assert (found.step, found.checkpoint, found.model.source) == (7, None, str(folder))
    (hub,) = make_probe(["org/model"], **GIVEN | {"data": "x.jsonl"}).models
    assert (hub.name, hub.model.source) == ("org/model", "org/model")


def test_what_is_not_named_well_is_said_before_anything_is_loaded(
    tiny_model: Path, run: Path, prompts: Path, tmp_path: Path
) -> None:
    assert refused(str(tiny_model)) == "--data: missing; name a file of prompts, because only a run has its own"
    assert "is not a model, run or checkpoint: it has no config.json" in refused(str(tmp_path), "--data", str(prompts))
    lost = tmp_path / "lost"
    shutil.copytree(run / "checkpoints" / "step-000002", lost)
    assert "is a checkpoint outside its run" in refused(str(lost), "--data", str(prompts))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "is an adapter without its model" in refused(str(adapter), "--data", str(prompts))
    assert "--html: the folder" in refused(
        str(tiny_model), "--data", str(prompts), "--html", str(tmp_path / "no" / "probe.html")
    )


@pytest.mark.slow
def test_data_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    message = refused(str(tiny_model), "--data", str(tmp_path / "no.jsonl"))
    assert message.startswith("--data: ")
    assert "no.jsonl" in message


@pytest.mark.nightly
def test_prompts_of_an_unusual_column(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "1+2="}\n')
    assert "it has text: set --prompt-column to one of them" in refused(str(tiny_model), "--data", str(other))
    assert probed(str(tiny_model), "--data", str(other), "--prompt-column", "text", *SMALL)["models"]


@pytest.mark.nightly
def test_a_tokenizer_that_is_elsewhere(tiny_model: Path, prompts: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    assert "give --tokenizer: a folder with tokenizer.json" in refused(str(bare), "--data", str(prompts))
    assert probed(str(bare), "--data", str(prompts), "--tokenizer", str(tiny_model), *SMALL)["models"]


def test_fields_become_options() -> None:
    said = in_options("lower sampling.maxResponseTokens, or lower sampling.maxPromptTokens")
    assert said == "lower --max-tokens, or lower --max-prompt-tokens"


def test_a_page_of_models_without_steps_or_exits_has_no_holes() -> None:
    skipped = {"agreement": 0.9, "layer": 1, "one_layer": 0.0, "threshold": None, "by_confidence": 0.0}
    names = ("greedy", "drawn", "likeliest", "probability", "confidence", "settled")
    layer = {"layer": 1, **dict.fromkeys(names, 1.0)}
    model = {"name": "a<b", "step": None, "layers": 1, "responses": 1, "tokens": 1, "suitability": 0.0}
    whole = ProbeResult.model_validate({"models": [{**model, "skipped": skipped, "by_layer": [layer]}] * 2})
    page = probe_page(whole)
    assert "a&lt;b: a model of one layer has no early exit" in page
