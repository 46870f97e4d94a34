"""Jobs from verl's configuration, as YAML and as a script's overrides."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhfless_functions.settings import RejectionSettings
from rlhfless_operator.convert import (
    UnreadableConfigurationError,
    convert_verl,
    job_yaml,
    read_configuration,
    table,
)
from rlhfless_operator.convert.conversion import Conversion, Left
from rlhfless_operator.job.reading.validation import parse_job
from rlhfless_operator.job.spec import RLHFJobSpec

SCRIPT = """\
set -x
# data.train_batch_size=1 in a comment counts for nothing
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-3B-Instruct}
export n_resp=8

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files="/data/gsm8k/train.parquet" \\
    data.val_files="['/data/gsm8k/test.parquet']" \\
    data.train_batch_size=256 \\
    data.max_prompt_length=512 \\
    data.max_response_length=1024 \\
    data.filter_overlong_prompts=True \\
    data.truncation='error' \\
    actor_rollout_ref.model.path=$MODEL_PATH \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.fsdp_config.param_offload=False \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=${n_resp} \\
    reward_model.reward_manager=dapo \\
    +reward_model.overlong_buffer.enable=True \\
    +reward_model.overlong_buffer.len=256 \\
    custom_reward_function.path=my_reward.py \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='verl_grpo' \\
    trainer.experiment_name='qwen2.5_3b' \\
    trainer.n_gpus_per_node=8 \\
    trainer.save_freq=20 \\
    trainer.test_freq=5 \\
    trainer.total_epochs=15 $@
"""


def nested(overrides: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, value in overrides.items():
        *parents, last = path.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


def converted(**given: Any) -> Conversion:
    """With `__` for the dots of names."""
    fields = {name.replace("__", "."): value for name, value in given.items()}
    base = {"data.train_files": "train.parquet", "actor_rollout_ref.model.path": "org/model"}
    return convert_verl({**base, **fields}, "verl.yaml")


def spec_of(conversion: Conversion) -> RLHFJobSpec:
    return parse_job(job_yaml(conversion)).spec


def left(conversion: Conversion) -> dict[str, str]:
    return {line.theirs: line.outcome.reason for line in conversion.left if isinstance(line.outcome, Left)}


def test_a_script_becomes_a_valid_job_with_every_override_accounted_for(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    configuration = read_configuration(tmp_path / "run.sh")
    given = configuration.fields
    assert (configuration.peer, configuration.lost) == ("verl", {})
    assert given["actor_rollout_ref.model.path"] == "Qwen/Qwen2.5-3B-Instruct"
    assert given["actor_rollout_ref.rollout.n"] == 8
    assert given["data.train_batch_size"] == 256
    conversion = convert_verl(given, "run.sh")
    assert left(conversion) == {}
    report = table(conversion)
    for name in given:
        assert f"{name}: " in report, name
    spec = spec_of(conversion)
    assert (spec.batch.prompts_per_step, spec.batch.samples_per_prompt, spec.batch.minibatch_samples) == (256, 8, 512)
    assert spec.batch.microbatch_tokens == 8 * 1536
    assert spec.algorithm.kl is not None
    assert (spec.algorithm.kl.coefficient, spec.algorithm.kl.placement, spec.algorithm.kl.estimator) == (
        0.001,
        "loss",
        "k3",
    )
    assert [(reward.name, reward.kind) for reward in spec.rewards] == [("score", "python"), ("length", "length")]
    assert spec.rewards[0].python.style == "verl"  # type: ignore[union-attr]
    assert spec.epochs == 15
    assert spec.evaluation is not None
    assert spec.evaluation.every_steps == 5


def test_yaml_and_overrides_come_to_the_same(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    overrides = read_configuration(tmp_path / "run.sh").fields
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nested(overrides)))
    configuration = read_configuration(tmp_path / "run.yaml")
    assert (configuration.peer, configuration.fields) == ("verl", overrides)


def test_defaults_that_differ_from_ours_are_written() -> None:
    spec = spec_of(converted(actor_rollout_ref__rollout__n=4))
    algorithm = spec.algorithm.resolved()
    assert (algorithm.advantage, algorithm.advantage_normalization, algorithm.dual_clip) == ("gae", "batch", 3.0)
    assert algorithm.critic is not None
    assert (algorithm.critic.value_clip, algorithm.critic.learning_rate) == (0.5, 1e-5)
    assert algorithm.importance_sampling.mode == "none"
    assert (spec.optimizer.weight_decay, spec.optimizer.beta2) == (0.01, 0.999)
    assert (spec.batch.prompts_per_step, spec.batch.minibatch_samples) == (1024, 1024)
    assert (spec.sampling.max_prompt_tokens, spec.sampling.max_response_tokens, spec.epochs) == (512, 512, 30)
    assert spec.data.long_prompts == "fail"


@pytest.mark.parametrize(("theirs", "ours"), [(0, 0), (1, 0), (5, 4)])
def test_verl_s_critic_warms_up_one_step_less_than_its_number(theirs: int, ours: int) -> None:
    conversion = converted(actor_rollout_ref__rollout__n=4, trainer__critic_warmup=theirs)
    critic = spec_of(conversion).algorithm.resolved().critic
    assert critic is not None
    assert critic.warmup_steps == ours


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 2.0, ("truncate", "token", None, 2.0)),
        ("token", "0.5_5.0", ("mask", "token", 0.5, 5.0)),
        ("sequence", "3", ("truncate", "sequence_product", None, 3.0)),
    ],
)
def test_corrections_for_the_sampler_keep_their_mode_and_bounds(
    level: str, threshold: Any, expected: tuple[Any, ...]
) -> None:
    given = {
        "algorithm__rollout_correction__rollout_is": level,
        "algorithm__rollout_correction__rollout_is_threshold": threshold,
    }
    correction = spec_of(converted(actor_rollout_ref__rollout__n=4, **given)).algorithm.importance_sampling
    assert (correction.mode, correction.level, correction.low, correction.high) == expected


def test_a_rejection_keeps_its_level_and_verl_s_bounds_are_those_of_the_inverse() -> None:
    given = {
        "algorithm__rollout_correction__rollout_rs": "seq_mean_k1",
        "algorithm__rollout_correction__rollout_rs_threshold": "0.5_4.0",
    }
    correction = spec_of(converted(actor_rollout_ref__rollout__n=4, **given)).algorithm.importance_sampling
    assert correction.mode == "none", "verl weighs nothing unless it is told to"
    assert correction.rejection == RejectionSettings(level="geometric_mean", low=0.25, high=2.0)


def test_a_rejection_that_there_is_not_here_is_left() -> None:
    conversion = converted(actor_rollout_ref__rollout__n=4, algorithm__rollout_correction__rollout_rs="token_k3")
    assert spec_of(conversion).algorithm.importance_sampling.rejection is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"algorithm__adv_estimator": "grpo"}, {"advantage": "group", "advantage_normalization": "group"}),
        (
            {"algorithm__adv_estimator": "grpo", "algorithm__norm_adv_by_std_in_grpo": False},
            {"advantage_normalization": "none"},
        ),
        (
            {"algorithm__adv_estimator": "rloo"},
            {"advantage": "leave_one_out", "ratio_level": "token", "aggregation": "token-mean"},
        ),
        (
            {"algorithm__adv_estimator": "reinforce_plus_plus"},
            {"advantage": "discounted", "advantage_normalization": "batch"},
        ),
        (
            {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__policy_loss__loss_mode": "gspo"},
            {"ratio_level": "sequence", "dual_clip": None},
        ),
        (
            {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__clip_ratio_high": 0.28},
            {"clip_low": 0.2, "clip_high": 0.28},
        ),
        # verl's own values of the sides count before clip_ratio.
        (
            {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__clip_ratio": 0.1},
            {"clip_low": 0.2, "clip_high": 0.2},
        ),
        (
            {
                "algorithm__adv_estimator": "grpo",
                "algorithm__filter_groups__enable": True,
                "algorithm__filter_groups__max_num_gen_batches": 10,
            },
            {"dynamic_sampling_rounds": 9},
        ),
    ],
)
def test_algorithms_are_compositions(given: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = spec_of(converted(actor_rollout_ref__rollout__n=4, **given))
    algorithm = spec.algorithm.resolved()
    assert {name: getattr(algorithm, name) for name in expected} == expected


def test_a_penalty_in_the_reward_keeps_its_estimator() -> None:
    spec = spec_of(converted(algorithm__use_kl_in_reward=True, algorithm__kl_ctrl__kl_coef=0.01))
    assert spec.algorithm.kl is not None
    assert (spec.algorithm.kl.coefficient, spec.algorithm.kl.placement, spec.algorithm.kl.estimator) == (
        0.01,
        "reward",
        "k1",
    )


def test_what_has_no_counterpart_is_left_with_its_reason_and_the_job_is_valid() -> None:
    conversion = converted(
        algorithm__adv_estimator="remax",
        actor_rollout_ref__rollout__n=4,
        actor_rollout_ref__rollout__top_p=0.9,
        actor_rollout_ref__actor__use_kl_loss=True,
        actor_rollout_ref__actor__kl_loss_type="kl",
        actor_rollout_ref__actor__loss_agg_mode="token-sum",
        data__val_files=["a.parquet", "b.parquet"],
        wibble__x=1,
    )
    names = {name.rpartition(".")[2] for name in left(conversion)}
    # The scorer that verl chooses by itself is left, too.
    assert names == {"adv_estimator", "top_p", "use_kl_loss", "loss_agg_mode", "x", "path"}
    assert "default_compute_score as compute_score" in left(conversion)["reward.custom_reward_function.path"]
    spec_of(conversion)


def test_warmup_is_rounded_as_verl_does() -> None:
    ratio = {"actor_rollout_ref__actor__optim__lr_warmup_steps_ratio": 0.1}
    assert spec_of(converted(**ratio, trainer__total_training_steps=48)).optimizer.warmup_steps == 4
    unknown = left(converted(**ratio))["actor_rollout_ref.actor.optim.lr_warmup_steps_ratio"]
    assert unknown.startswith("0.1 of the steps: write optimizer.warmupSteps")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it has no fields"),
        ("- a\n", "it has no fields"),
        ("a: [", "is not YAML"),
        ("apiVersion: rlhfless.io/v1alpha1\nkind: RLHFJob\n", "is a job already; check it with rlhfless validate"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UnreadableConfigurationError, match=message):
        read_configuration(tmp_path / "x.yaml")
    with pytest.raises(UnreadableConfigurationError, match="can't be read"):
        read_configuration(tmp_path / "none.yaml")
