"""Evaluations in jobs that run: by which rewards, and how their responses are sampled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.training.whole_jobs import MakeJob, assert_same_final_weights, folder_of, records_of, run_job

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

LONGEST = 24
GREEDY = {
    "data": {"source": "train.jsonl"},
    "sampling": {"temperature": 0},
    "rewards": [
        {"name": "ends", "format": {"pattern": ".*7"}},
        {"name": "short", "weight": 0.5, "length": {"bufferTokens": 8}},
    ],
}


def examples_of(file: Path, when: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder_of(file) / "samples.jsonl").read_text().splitlines()]
    return [line for line in lines if line["when"] == when]


def greedy_response(model: Any, tokenizer: Any, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    response = model.generate(ids, do_sample=False, max_new_tokens=LONGEST)[0, ids.shape[1] :]
    return str(tokenizer.decode(response, skip_special_tokens=True))


@pytest.mark.slow
def test_a_greedy_evaluation_with_rewards_of_its_own(tiny_job: MakeJob, tiny_model: Path) -> None:
    plain = tiny_job("plain", steps=2)
    run_job(plain)
    file = tiny_job("greedy", steps=2, evaluation=GREEDY)
    run_job(file)
    assert_same_final_weights(file, plain)
    before, first, last = records_of(file)
    own = {"reward/ends", "reward/short"}
    for evaluation in (before["evaluation"], last["evaluation"]):
        assert {name for name in evaluation if name in own | {"reward/digits"}} == own
        assert evaluation["reward"] == pytest.approx(evaluation["reward/ends"] + 0.5 * evaluation["reward/short"])
    assert "reward/digits" in first["metrics"]
    assert not own & first["metrics"].keys()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for when, source in (("before", tiny_model), ("after", folder_of(file) / "model")):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        examples = examples_of(file, when)
        assert examples
        for example in examples:
            assert example["response"] == greedy_response(model, tokenizer, example["prompt"])


@pytest.mark.nightly
def test_an_evaluation_at_a_temperature_of_its_own(tiny_job: MakeJob) -> None:
    """Almost greedy at one seed as at another, where training samples at 1."""
    cold = {"data": {"source": "train.jsonl"}, "sampling": {"temperature": 1e-6}}
    files = [tiny_job(f"seed-{seed}", steps=1, seed=seed, evaluation=cold) for seed in (0, 1)]
    files.append(tiny_job("seed-1-warm", steps=1, seed=1, evaluation={"data": {"source": "train.jsonl"}}))
    for file in files:
        run_job(file)
    first, second, warm = ([example["response"] for example in examples_of(file, "before")] for file in files)
    assert first == second != warm
