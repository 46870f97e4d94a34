"""Jobs whose engine does not compute what the learner does end at once, and say what to do."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlhfless_functions.data.rollouts import read_rollouts
from rlhfless_operator.records.mismatch import warning_now
from rlhfless_operator.records.record import StepRecord
from rlhfless_operator.training.stages.mismatch import MismatchError, check_mismatch, explained_by_formats
from tests.jobs import job
from tests.model.families import FAMILIES, save
from tests.training.whole_jobs import (
    MakeJob,
    folder_of,
    records_of,
    run_job,
    run_until_a_step_cannot_be_written,
    status_of,
)

MODEL = {"source": "org/model"}
EXPERTS = "qwen1.5, experts, window 0 that no layer uses"
WINDOW_FOR_ALL = """
import os, sys

def apply():
    if (masks := sys.modules.get("rlhfless_functions.model.attention_masks")) is None:
        return
    from rlhfless_functions.model.attention_masks import LayerMasks

    def of(config):
        text = config.get_text_config()
        kinds = frozenset(getattr(text, "layer_types", None) or ["full_attention"])
        return LayerMasks(kinds, getattr(text, "sliding_window", None))

    LayerMasks.of = of
    # Trials at the first load would refuse it before.
    from rlhfless_functions.generation.engines import transformers
    from rlhfless_functions.model import shared_prompts

    transformers.check_engine = lambda *given: None
    shared_prompts._trial = lambda *given, **more: ""

os.register_at_fork(after_in_child=apply)
"""


def found(mean: float, **metrics: float) -> dict[str, float]:
    return {"mismatch/mean_exp_abs": mean, **metrics}


@pytest.mark.parametrize(
    ("spec", "explained", "limit"),
    [
        ({"model": {**MODEL, "dtype": "float32"}}, 1.01, 1.2),
        ({"model": {**MODEL, "dtype": "float32"}, "learning": {"autocast": True}}, 1.05, 2.0),
        ({"model": {**MODEL, "dtype": "bfloat16"}, "learning": {"autocast": False}}, 1.05, 2.0),
        ({"generation": {"vllm": {"quantization": "fp8"}}}, 1.2, 5.0),
        ({"generation": {"engine": "vllm", "vllm": {"kvCacheDtype": "fp8"}}}, 1.2, 5.0),
        ({"generation": {"vllm": {"kvCacheDtype": "bfloat16"}}}, 1.05, 2.0),
        ({"limits": {"mismatch": 1.5}}, 1.05, 1.5),
    ],
)
def test_the_bounds_are_those_of_the_coarsest_format(spec: dict[str, Any], explained: float, limit: float) -> None:
    made = job(**spec).spec
    assert explained_by_formats(made) == explained
    check_mismatch(made, 1, found(limit))
    check_mismatch(made, 1, {})
    with pytest.raises(MismatchError, match=rf"step 3: .* is {limit + 0.1:.4g}, .*limits\.mismatch, {limit:g}"):
        check_mismatch(made, 3, found(limit + 0.1))


def test_nan_is_beyond_every_bound() -> None:
    with pytest.raises(MismatchError):
        check_mismatch(job(limits={"mismatch": 1e9}).spec, 1, found(float("nan")))


def test_steps_with_stale_tokens_are_not_judged() -> None:
    check_mismatch(job().spec, 2, found(100.0, **{"generation/staleness": 1.0}))
    with pytest.raises(MismatchError):
        check_mismatch(job().spec, 1, found(100.0, **{"generation/staleness": 0.0}))


def test_an_adapter_s_dropout_is_judged_only_by_a_limit_of_the_user() -> None:
    model = {**MODEL, "lora": {"dropout": 0.1}}
    assert explained_by_formats(job(model=model).spec) is None
    check_mismatch(job(model=model).spec, 1, found(100.0))
    with pytest.raises(MismatchError):
        check_mismatch(job(model=model, limits={"mismatch": 3}).spec, 1, found(100.0))


@pytest.fixture
def file(tiny_job: MakeJob, tmp_path: Path, tiny_model: Path) -> Path:
    """A job with Qwen1.5-MoE's kind of configuration: its window becomes 0, and none of its layers uses it."""
    folder = save(FAMILIES[EXPERTS], tmp_path / "experts", tiny_model)
    return tiny_job(model={"source": str(folder), "dtype": "float32"}, steps=1)


@pytest.mark.slow
@pytest.mark.usefixtures("cold_start", "nothing_is_left_behind")
@pytest.mark.nightly
def test_a_job_with_a_window_that_no_layer_uses_samples_as_its_model_defines(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its samples are there until the step is done.
    run_until_a_step_cannot_be_written(file, monkeypatch, 1, once=lambda: True)
    samples = read_rollouts(map(str, (folder_of(file) / "rollouts").rglob("*.parquet")))
    assert len(samples) == 16
    defined = AutoModelForCausalLM.from_pretrained(file.parent.parent / "experts")
    for sample in samples.values():
        prompt, response = sample.prompt_tokens, sample.response_tokens
        with torch.no_grad():
            logits = defined(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(sample.log_probs), expected, rtol=0, atol=1e-4)
    run_job(file)
    (record,) = records_of(file)
    assert record["metrics"]["mismatch/mean_exp_abs"] < 1.0001
    assert record["metrics"]["mismatch/explained"] == 1.01


@pytest.mark.nightly
@pytest.mark.usefixtures("cold_start", "nothing_is_left_behind")
def test_a_job_whose_engine_gives_all_layers_the_window_ends_at_its_first_step(
    file: Path, tiny_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(WINDOW_FOR_ALL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hook"), prepend=":")
    with pytest.raises(MismatchError, match=r"step 1: engine and learner .*limits\.mismatch, 1\.2"):
        run_job(file)
    assert (status_of(file)["phase"], status_of(file)["step"]) == ("Failed", 0)
    assert not (folder_of(file) / "model").exists()

    mean = re.search(r"above ([0-9.]+)\.", status_of(file)["message"])
    assert mean is not None
    file = tiny_job(
        model={"source": str(tmp_path / "experts"), "dtype": "float32"},
        steps=1,
        limits={"mismatch": float(mean[1]) + 1},
    )
    run_job(file)
    assert str(warning_now([StepRecord.model_validate(each) for each in records_of(file)])).startswith("step 1: engine")
