"""Jobs from TRL's configuration: fields and defaults against the installed TRL, and the arithmetic of its batches."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_operator.convert import convert_trl, job_yaml, read_configuration, table
from rlhfless_operator.convert.conversion import Conversion, Left, Written
from rlhfless_operator.convert.trl import ROWS
from rlhfless_operator.job.reading.validation import parse_job
from rlhfless_operator.job.spec import RLHFJobSpec

SMALLEST = {
    "model_name_or_path": "org/model",
    "dataset_name": "train.jsonl",
    "reward_funcs": ["my.rewards.score"],
    "max_steps": 10,
}
SMALLEST_BATCH = {"per_device_train_batch_size": 8, "num_generations": 4}

DEEPMATH = """\
# Model
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
use_peft: true
lora_r: 32
# Data
dataset_name: trl-lib/DeepMath-103K
reward_funcs: [accuracy_reward, think_format_reward, get_soft_overlong_punishment]
reward_weights: [1.0, 0.5, 1]
# Training
output_dir: out/Deep_Math
learning_rate: 1e-5
max_steps: 480
warmup_ratio: 0.1
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
num_generations: 8
max_completion_length: 1024
loss_type: dr_grpo
scale_rewards: false
epsilon_high: 0.28
beta: 0.001
use_vllm: true
vllm_importance_sampling_mode: token_truncate
eval_strategy: steps
eval_steps: 100
report_to: [tensorboard]
logging_steps: 5
log_completions: true
top_p: 0.9
"""


def converted(processes: int = 1, **given: Any) -> Conversion:
    return convert_trl({**SMALLEST, **given}, "trl.yaml", processes)


def spec_of(conversion: Conversion) -> RLHFJobSpec:
    return parse_job(job_yaml(conversion)).spec


def left(conversion: Conversion) -> dict[str, str]:
    return {line.theirs: line.outcome.reason for line in conversion.left if isinstance(line.outcome, Left)}


def fields_of_trl() -> dict[str, Any]:
    """The fields of a run of TRL's GRPO, with their defaults."""
    from trl import GRPOConfig, ModelConfig
    from trl.scripts.grpo import GRPOScriptArguments

    return {
        field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()
        for cls in (GRPOConfig, ModelConfig, GRPOScriptArguments)
        for field in dataclasses.fields(cls)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }


def test_every_field_of_trl_is_in_the_table() -> None:
    assert fields_of_trl().keys() - ROWS.keys() == set()


def test_what_is_written_for_a_field_that_is_left_out_is_trls_default() -> None:
    theirs = fields_of_trl()
    # A job has all checkpoints that it needs, and its own engine's sizes.
    ours_to_choose = {"max_prompt_length"}
    written = [line.theirs for line in converted(use_peft=True).lines if isinstance(line.outcome, Written)]
    for name in set(written) - SMALLEST.keys() - ours_to_choose - {"use_peft"}:
        assert ROWS[name].default == theirs[name], name


def test_defaults_that_differ_from_ours_are_written() -> None:
    spec = spec_of(converted())
    assert spec.optimizer.beta2 == 0.999
    assert spec.optimizer.schedule == "linear"
    assert spec.sampling.max_response_tokens == 512
    assert spec.algorithm.importance_sampling.mode == "none"
    assert spec.model.dtype == "float32"
    assert spec.data.long_prompts == "fail"
    assert (spec.batch.prompts_per_step, spec.batch.samples_per_prompt) == (1, 8)
    assert spec.seed == 42
    assert spec_of(converted(use_peft=True)).model.lora.dropout == 0.05  # type: ignore[union-attr]
    assert parse_job(job_yaml(convert_trl({**SMALLEST, "max_steps": -1}, "x", 1))).spec.epochs == 3


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 8},
        {"gradient_accumulation_steps": 2, "generation_batch_size": 64, "num_iterations": 3},
        {"num_iterations": 2},
    ],
)
def test_batches_are_trls(processes: int, given: dict[str, Any], tmp_path: Path) -> None:
    from trl import GRPOConfig

    given = {**SMALLEST_BATCH, "max_steps": 24, **given}
    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **given)
    if processes > 1:  # TRL has no other way to be told in one process
        generated = given.get("generation_batch_size") or theirs.generation_batch_size * processes
    else:
        generated = theirs.generation_batch_size
    spec = spec_of(converted(processes, **given))
    assert spec.batch.prompts_per_step * spec.batch.samples_per_prompt == generated
    assert spec.batch.samples_per_prompt == theirs.num_generations
    update = theirs.per_device_train_batch_size * theirs.gradient_accumulation_steps * processes
    assert (spec.batch.minibatch_samples or generated) == update
    assert spec.algorithm.epochs == theirs.num_iterations
    assert spec.steps == math.ceil(24 * update / generated / theirs.num_iterations)


def test_an_update_of_several_generations_is_one_step() -> None:
    spec = spec_of(converted(**SMALLEST_BATCH, gradient_accumulation_steps=4, steps_per_generation=1))
    assert (spec.batch.prompts_per_step, spec.batch.minibatch_samples, spec.steps) == (8, None, 10)
    odd = converted(**SMALLEST_BATCH, gradient_accumulation_steps=4, steps_per_generation=1, num_iterations=2)
    assert "is no step here" in left(odd)["per_device_train_batch_size"]


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({"warmup_ratio": 0.1, "max_steps": 48}, 5),
        ({"warmup_steps": 0.1, "max_steps": 30}, 3),
        ({"warmup_steps": 7}, 7),
        ({"warmup_steps": 7, **SMALLEST_BATCH, "steps_per_generation": 2}, 4),
        ({"warmup_steps": 7, "lr_scheduler_type": "constant_with_warmup"}, 7),
        ({"warmup_steps": 7, "lr_scheduler_type": "constant"}, 0),
    ],
)
def test_warmup_counts_steps(given: dict[str, Any], steps: int) -> None:
    assert spec_of(converted(**given)).optimizer.warmup_steps == steps


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"loss_type": "grpo"}, {"aggregation": "seq-mean-token-mean", "clip": "ppo"}),
        ({"loss_type": "bnpo"}, {"aggregation": "token-mean"}),
        ({"loss_type": "dr_grpo", "scale_rewards": False}, {"aggregation": "seq-mean-token-sum-norm"}),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, {"clip": "cispo", "clip_low": 1.0, "clip_high": 4.0}),
        (
            {"loss_type": "sapo", "sapo_temperature_neg": 2.0},
            {"clip": "sapo", "sapo_temperature_negative": 2.0, "clip_low": None},
        ),
        ({"multi_objective_aggregation": "normalize_then_sum"}, {"advantage_normalization": "group_per_reward"}),
        ({"scale_rewards": "none"}, {"advantage_normalization": "none"}),
        ({"scale_rewards": True}, {"advantage_normalization": "group"}),
        ({"epsilon": 0.1}, {"clip_low": 0.1, "clip_high": 0.1}),
        ({"epsilon": 0.1, "epsilon_high": 0.3, "delta": 4.0}, {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 4.0}),
        ({"importance_sampling_level": "sequence"}, {"ratio_level": "sequence"}),
    ],
)
def test_losses_are_compositions(given: dict[str, Any], expected: dict[str, Any]) -> None:
    algorithm = spec_of(converted(**given)).algorithm.resolved()
    assert {name: getattr(algorithm, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "mode", "level", "low", "high"),
    [
        ({}, "mask", "sequence_product", None, 3.0),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
            "mask",
            "token",
            0.5,
            3.0,
        ),
        (
            {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_cap": 2},
            "truncate",
            "token",
            None,
            2.0,
        ),
        ({"vllm_importance_sampling_clip_max": None}, "mask", "sequence_product", None, 1e9),
        ({"vllm_importance_sampling_correction": False}, "none", "token", None, 2.0),
    ],
)
def test_corrections_for_the_sampler_keep_their_mode_and_bounds(
    given: dict[str, Any], mode: str, level: str, low: float | None, high: float
) -> None:
    correction = spec_of(converted(use_vllm=True, **given)).algorithm.importance_sampling
    assert (correction.mode, correction.level, correction.low, correction.high) == (mode, level, low, high)


def test_what_has_no_counterpart_is_left_with_its_reason_and_the_job_is_valid() -> None:
    conversion = converted(loss_type="vespo", top_k=50, optim="lion_32bit", wibble=1, sync_ref_model=True, min_p=None)
    assert left(conversion).keys() == {"loss_type", "top_k", "optim", "wibble", "sync_ref_model"}
    assert "has no such field" in left(conversion)["wibble"]
    spec_of(conversion)
    assert "# Left to you:\n#   loss_type: vespo: vespo is no loss here" in job_yaml(conversion)


def test_a_value_of_the_wrong_kind_is_left() -> None:
    conversion = converted(learning_rate="fast", num_generations=3.5, reward_weights=[1, 2])
    assert {"reward_funcs", "per_device_train_batch_size"} <= left(conversion).keys()
    assert any("could not convert" in reason for reason in left(conversion).values())


def test_a_published_configuration_becomes_a_valid_job_with_every_field_accounted_for(tmp_path: Path) -> None:
    file = tmp_path / "deepmath.yaml"
    file.write_text(DEEPMATH)
    configuration = read_configuration(file)
    given = configuration.fields
    conversion = convert_trl(given, file.name)
    assert (configuration.peer, configuration.processes) == ("trl", None)
    job = parse_job(job_yaml(conversion))
    spec = job.spec
    assert job.metadata.name == "deep-math"
    assert (spec.steps, spec.optimizer.warmup_steps, spec.optimizer.learning_rate) == (240, 24, 1e-5)
    assert [(reward.name, reward.kind, reward.weight) for reward in spec.rewards] == [
        ("accuracy", "math", 1.0),
        ("think-format", "format", 0.5),
        ("length", "length", 1.0),
    ]
    assert spec.data.ground_truth_column == "solution"
    correction = spec.algorithm.importance_sampling
    assert (correction.mode, correction.level, correction.high) == ("truncate", "token", 3.0)
    assert spec.model.lora is not None
    assert spec.model.lora.target_modules == ["q_proj", "v_proj"]
    assert spec.evaluation is not None
    assert spec.evaluation.every_steps == 50
    report = table(conversion)
    for name in given:
        assert f"{name}: " in report, name
    assert left(conversion).keys() == {"reward_funcs", "top_p"}
    assert (spec.data.source, spec.data.split) == ("hub:trl-lib/DeepMath-103K", "train")
    assert (spec.evaluation.data.source, spec.evaluation.data.split) == ("hub:trl-lib/DeepMath-103K", "test")


def test_rewards_of_a_script_and_models_are_named() -> None:
    spec = spec_of(converted(reward_funcs=None, reward_model_name_or_path="org/reward", reward_weights=[2.0]))
    assert (spec.rewards[0].kind, spec.rewards[0].weight) == ("model", 2.0)
    without = converted(reward_funcs=None)
    assert "put yours into reward.py" in left(without)["reward_funcs"]
    assert spec_of(without).rewards[0].python.file == "reward.py"  # type: ignore[union-attr]
    (term,) = spec_of(converted()).rewards
    assert term.python is not None
    assert (term.python.file, term.python.function, term.python.style) == ("my/rewards.py", "score", "trl")


def test_the_document_says_what_each_value_was_made_of() -> None:
    text = job_yaml(converted(warmup_ratio=0.5, learning_rate=2e-6))
    assert "    learningRate: 2.0e-06  # learning_rate\n" in text
    assert "    warmupSteps: 5  # warmup_ratio\n" in text
    assert "    beta2: 0.999  # TRL's default\n" in text
    assert yaml.safe_load(text)["spec"]["steps"] == 10


# --- tools and environments --------------------------------------------------------------------------------------


def test_an_environment_keeps_its_class_its_score_and_its_turns() -> None:
    conversion = converted(environment_factory="games.maze.Maze", max_tool_calling_iterations=3, reward_funcs=None)
    spec = spec_of(conversion)
    assert spec.environment is not None and spec.environment.python is not None
    assert (spec.environment.python.file, spec.environment.python.class_name) == ("games/maze.py", "Maze")
    assert spec.environment.max_turns == 4, "after the last call the model has one more turn"
    assert [(reward.name, reward.kind) for reward in spec.rewards] == [("maze", "environment")]
    assert left(conversion)["reward_funcs"] == "remove reward maze if its class has no get_reward"


def test_tools_are_functions_of_files_and_other_rewards_stay() -> None:
    conversion = converted(tools=["mine.search.search", "fetch"])
    spec = spec_of(conversion)
    assert spec.environment is not None
    assert spec.environment.tools == ["mine/search.py:search", "tools.py:fetch"]
    assert spec.environment.max_turns == 1000, "TRL's turns are not limited"
    assert [reward.name for reward in spec.rewards] == ["score"]
    assert left(conversion)["tools"] == "its script has fetch: put it into tools.py"


def test_a_job_without_tools_has_no_limit_of_turns() -> None:
    assert spec_of(converted(max_tool_calling_iterations=3)).environment is None
