"""The memory that stages need, beside what torch counts and what is known of models."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rlhfless_operator.planner.memory import LearnerSetup, engine_memory, learner_memory, preparation_memory
from rlhfless_operator.training.costs.model_shape import find_shape

ROOT = Path(__file__).parents[2]
SMALL = {
    "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 1024, "vocab_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {**SMALL, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ({**SMALL, "model_type": "qwen2"}, 1),
        ({**EXPERTS, "model_type": "qwen3_moe"}, 8),
        pytest.param({**SMALL, "model_type": "qwen2"}, 8, marks=pytest.mark.nightly),
        pytest.param({**EXPERTS, "model_type": "qwen3_moe"}, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_learner_takes_what_torch_counts(config: dict[str, object], ranks: int) -> None:
    options = ["--config", json.dumps(config), "--ranks", str(ranks), "--tokens", "1024"]
    command = [sys.executable, "benchmarks/planning/learner_memory.py", *options]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    rows = [json.loads(line) for line in told.splitlines()]
    assert rows
    for row in rows:
        assert row["account"] == pytest.approx(row["torch"], rel=0.07), row


def test_a_full_fine_tune_has_sixteen_bytes_a_parameter_divided_among_ranks() -> None:
    model = find_shape("Qwen/Qwen2.5-32B")
    alone = learner_memory(model, LearnerSetup())
    assert alone.state == pytest.approx(16 * 32.5e9, rel=0.02)
    assert learner_memory(model, LearnerSetup(ranks=8)).state == pytest.approx(alone.state / 8)
    assert learner_memory(model, LearnerSetup(offload=True)).state == pytest.approx(alone.state / 2)
    assert learner_memory(model, LearnerSetup(critic=True)).state > 1.9 * alone.state
    assert learner_memory(model, LearnerSetup(lora_rank=16)).state < 1.1 * 2 * 32.8e9


def test_checkpointing_and_shorter_micro_batches_take_less() -> None:
    model, whole = find_shape("Qwen/Qwen2.5-7B"), LearnerSetup()
    passing = [
        learner_memory(model, setup).passing
        for setup in (whole, replace(whole, checkpointing=True), replace(whole, checkpointing=True, tokens=4096))
    ]
    assert passing == sorted(passing, reverse=True) and passing[0] > 2 * passing[1]


def test_several_ranks_hold_no_copies_of_all_layers() -> None:
    model = find_shape("Qwen/Qwen2.5-32B")
    alone, shared = (
        learner_memory(model, LearnerSetup(ranks=ranks, tokens=1024, checkpointing=True)).passing for ranks in (1, 8)
    )
    assert alone > 2 * 31e9, "autocast's copies in bfloat16"
    assert shared < 16e9


def test_gradients_of_whole_tensors_wait_where_a_quarter_of_the_memory_holds_them() -> None:
    model = find_shape("Qwen/Qwen2.5-3B")
    waiting, exchanging = (
        learner_memory(model, LearnerSetup(ranks=8, tokens=1024, checkpointing=True, gpu_memory=memory)).passing
        for memory in (50e9, 49e9)
    )
    assert waiting - exchanging == pytest.approx(4 * model.parameters * 7 / 8, rel=0.05)


def test_an_engine_divides_weights_and_preparation_does_not() -> None:
    model = find_shape("mistralai/Mixtral-8x7B-v0.1")
    assert model.parameters == pytest.approx(46.7e9, rel=0.01)
    assert model.active_parameters == pytest.approx(12.9e9, rel=0.01)
    assert model.touched_parameters(64) == pytest.approx(model.parameters, rel=0.001)
    one, four = engine_memory(model, 1, 2048), engine_memory(model, 4, 2048)
    assert one.total > 2 * model.parameters and four.state == pytest.approx(one.state / 4, rel=0.01)
    setup = LearnerSetup()
    two, reference = (preparation_memory(model, setup, count) for count in (2, 1))
    assert two.state == 2 * reference.state == pytest.approx(4 * model.parameters)
