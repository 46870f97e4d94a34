"""The table of verl's configuration of its PPO trainer, as YAML or as overrides on a command line.

Fields, defaults and meanings are those of verl 0.9 (`trainer/config/ppo_trainer.yaml`). The table also has names from
older releases.
"""

from collections.abc import Mapping
from typing import Any

from rlhfless_operator.convert import verl_algorithm as algorithm
from rlhfless_operator.convert import verl_meanings as meanings
from rlhfless_operator.convert.conversion import (
    Conversion,
    Row,
    Written,
    convert_rows,
    job_name,
    one_of,
    part_of,
    renamed,
    to,
    without,
)
from rlhfless_operator.convert.reading.overrides import interpolated
from rlhfless_operator.convert.verl_algorithm import ACTOR
from rlhfless_operator.convert.verl_engines import ENGINES
from rlhfless_operator.convert.verl_meanings import MODEL, OPTIMIZER, ROLLOUT
from rlhfless_operator.convert.verl_others import OPEN, OTHERS


def convert_verl(given: Mapping[str, Any], source: str, lost: Mapping[str, str] | None = None) -> Conversion:
    """Convert verl's configuration to a job.

    Args:
        given: its fields; dots separate nested ones.
        source: name of its file.
        lost: parts of the file that are no fields, and why they were not converted.
    """
    given = interpolated(given, {name: row.default for name, row in ROWS.items()})
    opened = {
        name: Row(None, without(reason))
        for name in given
        for section, reason in OPEN.items()
        if name not in ROWS and name.startswith(f"{section}.")
    }
    whole = "data.apply_chat_template_kwargs"
    switches = tuple(name for name in given if name.startswith(f"{whole}."))
    opened |= {name: Row(None, part_of("data.chatTemplateKwargs")) for name in switches}
    rows = {**opened, **ROWS, whole: Row(None, meanings.template_arguments, also=switches)}
    return convert_rows("verl 0.9", source, rows, given, lost=lost)


_ADAM = dict.fromkeys(("AdamW", "adamw", "adam", "Adam"), "adamw")
_OF_ADAM = one_of("optimizer.name", _ADAM, "AdamW is written", "adamw")

ROWS: dict[str, Row] = {
    "trainer.experiment_name": Row("gsm8k", lambda value, theirs: Written({"metadata.name": job_name(str(value))})),
    "trainer.project_name": Row("verl_examples", part_of("tracking.wandb")),
    # model
    f"{MODEL}.path": Row("~/models/deepseek-llm-7b-chat", to("model.source")),
    **renamed({f"{MODEL}.tokenizer_path": None, f"{MODEL}.custom_chat_template": None}),
    f"{ROLLOUT}.dtype": Row(
        "bfloat16",
        one_of(
            "model.dtype",
            {"bfloat16": "bfloat16", "float32": "float32"},
            "weights are float32 or bfloat16; bfloat16 is written instead",
            "bfloat16",
        ),
    ),
    f"{MODEL}.lora_rank": Row(0, meanings.lora, also=(f"{MODEL}.lora.rank",)),
    **{
        f"{MODEL}.{name}": Row(default, part_of("model.lora"))
        for name, default in {
            "lora_alpha": 16,
            "target_modules": "all-linear",
            "lora.rank": 0,
            "lora.alpha": 32,
            "lora.dropout": 0.0,
            "lora.target_modules": None,
        }.items()
    },
    f"{ACTOR}.fsdp_config.dtype": Row("bfloat16", meanings.autocast),
    **renamed({f"{MODEL}.enable_gradient_checkpointing": True}),
    # data and rewards
    "data.train_files": Row(None, meanings.files),
    "data.val_files": Row(None, meanings.evaluation),
    **renamed({"data.prompt_key": "prompt"}),
    "data.shuffle": Row(True, to("data.shuffle")),
    "data.apply_chat_template_kwargs": Row(None, meanings.template_arguments),
    "data.truncation": Row("error", meanings.long_prompts, also=("data.filter_overlong_prompts",)),
    "data.filter_overlong_prompts": Row(False, part_of("data.longPrompts")),
    "reward.custom_reward_function.path": Row(None, meanings.rewards, also=meanings.REWARDS),
    **{
        name: Row(default, part_of("rewards"))
        for name, default in {
            "reward.custom_reward_function.name": "compute_score",
            "custom_reward_function.path": None,
            "custom_reward_function.name": None,
            "reward.reward_model.enable": False,
            "reward.reward_model.model_path": None,
            "reward_model.enable": None,
            "reward_model.model.path": None,
            **{
                f"{place}.{field}": default
                for place in meanings.OVERLONG
                for field, default in {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}.items()
            },
            **dict.fromkeys(meanings.LONGEST),
        }.items()
    },
    # algorithm
    "algorithm.adv_estimator": Row("gae", algorithm.advantage),
    "algorithm.norm_adv_by_std_in_grpo": Row(True, part_of("algorithm.advantageNormalization")),
    "algorithm.gamma": Row(1.0, algorithm.gamma),
    "algorithm.lam": Row(1.0, algorithm.of_gae("algorithm.gaeLambda")),
    f"{ACTOR}.policy_loss.loss_mode": Row("vanilla", algorithm.loss_mode),
    f"{ACTOR}.clip_ratio": Row(0.2, part_of("algorithm.clipLow and clipHigh, where those of a side are null")),
    f"{ACTOR}.clip_ratio_low": Row(0.2, algorithm.clip("clip_ratio_low", "clipLow")),
    f"{ACTOR}.clip_ratio_high": Row(0.2, algorithm.clip("clip_ratio_high", "clipHigh")),
    f"{ACTOR}.clip_ratio_c": Row(3.0, algorithm.dual_clip),
    f"{ACTOR}.loss_agg_mode": Row("token-mean", algorithm.aggregation),
    **renamed({f"{ACTOR}.entropy_coeff": 0, f"{ACTOR}.ppo_epochs": 1}),
    f"{ACTOR}.use_kl_loss": Row(False, algorithm.kl, also=("algorithm.use_kl_in_reward",)),
    **{
        name: Row(default, part_of("algorithm.kl"))
        for name, default in {
            f"{ACTOR}.kl_loss_coef": 0.001,
            f"{ACTOR}.kl_loss_type": "low_var_kl",
            "algorithm.use_kl_in_reward": False,
            "algorithm.kl_penalty": "kl",
            "algorithm.kl_ctrl.kl_coef": 0.001,
        }.items()
    },
    "algorithm.filter_groups.enable": Row(False, algorithm.rounds),
    "algorithm.filter_groups.max_num_gen_batches": Row(0, part_of("algorithm.dynamicSamplingRounds")),
    "algorithm.filter_groups.metric": Row("reward", without("groups of equal reward are replaced", "reward")),
    f"{ACTOR}.loss_scale_factor": Row(None, algorithm.scale_factor),
    f"{ACTOR}.tau_pos": Row(1.0, algorithm.tau("sapoTemperaturePositive")),
    f"{ACTOR}.tau_neg": Row(1.05, algorithm.tau("sapoTemperatureNegative")),
    "algorithm.rollout_correction.rollout_is": Row(None, algorithm.correction, also=algorithm.OLD_CORRECTION),
    **{
        name: Row(default, part_of("algorithm.importanceSampling"))
        for name, default in {
            f"{ACTOR}.tis_imp_ratio_cap": -1,
            "algorithm.rollout_is": False,
            "algorithm.rollout_is_threshold": None,
            "algorithm.rollout_is_threshold_lower": None,
            "algorithm.rollout_is_level": "token",
            "algorithm.rollout_is_mode": "truncate",
        }.items()
    },
    "algorithm.rollout_correction.bypass_mode": Row(False, algorithm.bypass),
    "algorithm.rollout_correction.loss_type": Row("ppo_clip", part_of("algorithm.proximalPolicy")),
    "algorithm.rollout_correction.rollout_is_threshold": Row(2.0, part_of("algorithm.importanceSampling")),
    "algorithm.rollout_correction.rollout_rs": Row(None, algorithm.rejection),
    "algorithm.rollout_correction.rollout_rs_threshold": Row(None, part_of("algorithm.importanceSampling.rejection")),
    "critic.optim.lr": Row(1e-5, algorithm.of_gae("algorithm.critic.learningRate")),
    "critic.cliprange_value": Row(0.5, algorithm.of_gae("algorithm.critic.valueClip")),
    **{f"critic.{name}": Row(None, meanings.as_actor(actor, ours)) for name, (actor, ours) in meanings.CRITIC.items()},
    "trainer.critic_warmup": Row(0, meanings.critic_warmup),
    # sampling and batch
    f"{ROLLOUT}.temperature": Row(1.0, to("sampling.temperature")),
    **renamed({"data.max_prompt_length": 512, "data.max_response_length": 512}),
    **renamed({"data.train_batch_size": 1024, f"{ROLLOUT}.n": 1}),
    f"{ACTOR}.ppo_mini_batch_size": Row(256, meanings.minibatch),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Row(
        None, meanings.microbatch, also=(f"{ACTOR}.ppo_max_token_len_per_gpu",)
    ),
    f"{ACTOR}.use_dynamic_bsz": Row(False, part_of("batch.microbatchTokens")),
    f"{ACTOR}.ppo_max_token_len_per_gpu": Row(16384, part_of("batch.microbatchTokens")),
    # optimizer
    f"{OPTIMIZER}.optimizer": Row("AdamW", _OF_ADAM),
    f"{OPTIMIZER}.name": Row(None, lambda value, theirs: None if value is None else _OF_ADAM(value, theirs)),
    **renamed({f"{OPTIMIZER}.lr": 1e-6}),
    f"{OPTIMIZER}.betas": Row([0.9, 0.999], meanings.betas),
    f"{OPTIMIZER}.eps": Row(None, to("optimizer.epsilon")),
    f"{OPTIMIZER}.weight_decay": Row(0.01, meanings.weight_decay),
    f"{OPTIMIZER}.clip_grad": Row(1.0, part_of("optimizer.maxGradientNorm, which actor.grad_clip is")),
    **renamed({f"{ACTOR}.grad_clip": 1.0}),
    f"{OPTIMIZER}.lr_scheduler_type": Row("constant", meanings.schedule, also=meanings.SCHEDULES),
    **{name: Row(None, part_of("optimizer.schedule")) for name in meanings.SCHEDULES},
    f"{OPTIMIZER}.min_lr_ratio": Row(0.0, meanings.final_ratio, also=meanings.LOWEST),
    **{name: Row(None, part_of("optimizer.finalRatio")) for name in meanings.LOWEST},
    f"{OPTIMIZER}.lr_warmup_steps": Row(-1, meanings.warmup, also=(f"{OPTIMIZER}.lr_warmup_steps_ratio",)),
    f"{OPTIMIZER}.lr_warmup_steps_ratio": Row(0.0, part_of("optimizer.warmupSteps")),
    # the run
    "trainer.total_epochs": Row(30, meanings.length, also=("trainer.total_training_steps",)),
    "trainer.total_training_steps": Row(None, part_of("steps")),
    "data.seed": Row(None, to("seed")),
    f"{ROLLOUT}.name": Row(None, meanings.engine),
    f"{ROLLOUT}.quantization": Row(None, to("generation.vllm.quantization")),
    f"{ROLLOUT}.tensor_model_parallel_size": Row(None, to("generation.vllm.tensorParallelSize")),
    "trainer.save_freq": Row(-1, meanings.checkpoints),
    **renamed({"trainer.max_actor_ckpt_to_keep": None}),
    "trainer.test_freq": Row(-1, part_of("evaluation")),
    **{
        f"{ROLLOUT}.val_kwargs.{name}": Row(default, part_of("evaluation"))
        for name, default in {"n": 1, "do_sample": False, "temperature": 0}.items()
    },
    "trainer.logger": Row(["console", "wandb"], meanings.logger),
    **OTHERS,
    **ENGINES,
}
"""Rows of all fields, each with its default and its conversion."""
