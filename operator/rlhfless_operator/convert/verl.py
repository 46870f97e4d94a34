"""The table of verl's configuration of its PPO trainer, as YAML or as overrides on a command line.

Fields, defaults and meanings are those of verl 0.9 (`trainer/config/ppo_trainer.yaml`). The table also has names from
older releases.
"""

from collections.abc import Mapping
from typing import Any

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
    unneeded,
    without,
)
from rlhfless_operator.convert.verl_meanings import ACTOR, MODEL, OPTIMIZER, ROLLOUT
from rlhfless_operator.convert.verl_others import OTHERS, reason_of_prefix


def convert_verl(given: Mapping[str, Any], source: str) -> Conversion:
    """Convert verl's configuration to a job.

    Args:
        given: its fields; dots separate nested ones.
        source: name of its file.
    """
    others = {name: Row(None, unneeded(reason)) for name in given if (reason := reason_of_prefix(name)) is not None}
    return convert_rows("verl 0.9", source, {**others, **ROWS}, given)


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
        for name, default in {"lora.rank": 0, "lora_alpha": 16, "target_modules": "all-linear"}.items()
    },
    **renamed({f"{MODEL}.enable_gradient_checkpointing": True}),
    # data and rewards
    "data.train_files": Row(None, meanings.files),
    "data.val_files": Row(None, meanings.evaluation),
    **renamed({"data.prompt_key": "prompt"}),
    "data.shuffle": Row(True, to("data.shuffle")),
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
                for place in ("reward.reward_kwargs.overlong_buffer_cfg", "reward_model.overlong_buffer")
                for field, default in {"enable": False, "len": 0, "penalty_factor": 1.0, "log": False}.items()
            },
        }.items()
    },
    # algorithm
    "algorithm.adv_estimator": Row("gae", meanings.advantage),
    "algorithm.norm_adv_by_std_in_grpo": Row(True, part_of("algorithm.advantageNormalization")),
    "algorithm.gamma": Row(1.0, meanings.gamma),
    "algorithm.lam": Row(1.0, meanings.of_gae("algorithm.gaeLambda")),
    f"{ACTOR}.policy_loss.loss_mode": Row("vanilla", meanings.loss_mode),
    f"{ACTOR}.clip_ratio": Row(0.2, part_of("algorithm.clipLow and clipHigh, where those of a side are null")),
    f"{ACTOR}.clip_ratio_low": Row(0.2, meanings.clip("clip_ratio_low", "clipLow")),
    f"{ACTOR}.clip_ratio_high": Row(0.2, meanings.clip("clip_ratio_high", "clipHigh")),
    f"{ACTOR}.clip_ratio_c": Row(3.0, meanings.dual_clip),
    f"{ACTOR}.loss_agg_mode": Row("token-mean", meanings.aggregation),
    **renamed({f"{ACTOR}.entropy_coeff": 0, f"{ACTOR}.ppo_epochs": 1}),
    f"{ACTOR}.use_kl_loss": Row(False, meanings.kl, also=("algorithm.use_kl_in_reward",)),
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
    "algorithm.kl_ctrl.type": Row("fixed", without("the coefficient stays as it is", "fixed")),
    "algorithm.filter_groups.enable": Row(False, meanings.rounds),
    "algorithm.filter_groups.max_num_gen_batches": Row(0, part_of("algorithm.dynamicSamplingRounds")),
    "algorithm.filter_groups.metric": Row("reward", without("groups of equal reward are replaced", "reward")),
    "algorithm.rollout_correction.rollout_is": Row(None, meanings.correction),
    "algorithm.rollout_correction.rollout_is_threshold": Row(2.0, part_of("algorithm.importanceSampling")),
    "algorithm.rollout_correction.rollout_rs": Row(None, meanings.rejection),
    "algorithm.rollout_correction.rollout_rs_threshold": Row(None, part_of("algorithm.importanceSampling.rejection")),
    "critic.optim.lr": Row(1e-5, meanings.of_gae("algorithm.critic.learningRate")),
    "critic.cliprange_value": Row(0.5, meanings.of_gae("algorithm.critic.valueClip")),
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
    f"{OPTIMIZER}.optimizer": Row("AdamW", one_of("optimizer.name", {"AdamW": "adamw"}, "AdamW is written", "adamw")),
    **renamed({f"{OPTIMIZER}.lr": 1e-6}),
    f"{OPTIMIZER}.betas": Row([0.9, 0.999], meanings.betas),
    f"{OPTIMIZER}.weight_decay": Row(0.01, to("optimizer.weightDecay")),
    f"{OPTIMIZER}.clip_grad": Row(1.0, part_of("optimizer.maxGradientNorm, which actor.grad_clip is")),
    **renamed({f"{ACTOR}.grad_clip": 1.0}),
    f"{OPTIMIZER}.lr_scheduler_type": Row("constant", meanings.schedule, also=(f"{OPTIMIZER}.warmup_style",)),
    f"{OPTIMIZER}.warmup_style": Row(None, part_of("optimizer.schedule")),
    **renamed({f"{OPTIMIZER}.min_lr_ratio": 0.0}),
    f"{OPTIMIZER}.lr_warmup_steps": Row(-1, meanings.warmup, also=(f"{OPTIMIZER}.lr_warmup_steps_ratio",)),
    f"{OPTIMIZER}.lr_warmup_steps_ratio": Row(0.0, part_of("optimizer.warmupSteps")),
    # the run
    "trainer.total_epochs": Row(30, meanings.length, also=("trainer.total_training_steps",)),
    "trainer.total_training_steps": Row(None, part_of("steps")),
    "data.seed": Row(None, to("seed")),
    f"{ROLLOUT}.name": Row(None, meanings.engine),
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
}
"""Rows of all fields, each with its default and its conversion."""
