"""The table of OpenRLHF's command line, `openrlhf.cli.train_ppo_ray`.

Names, defaults and meanings are those of OpenRLHF 0.11, whose names have dots. The flat names of older releases are
read as the names that they have now.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhfless_operator.convert import openrlhf_meanings as meanings
from rlhfless_operator.convert.conversion import Conversion, Row, convert_rows, one_of, part_of, to
from rlhfless_operator.convert.openrlhf_others import OLD, OTHERS


def convert_openrlhf(given: Mapping[str, Any], source: str, lost: Mapping[str, str] | None = None) -> Conversion:
    """Convert OpenRLHF's arguments to a job.

    Args:
        given: its arguments by name, without hyphens.
        source: name of its file.
        lost: parts of the file that are no arguments, and why they were not converted.
    """
    written = {OLD.get(name, name): name for name in given}
    conversion = convert_rows(
        "OpenRLHF 0.11", source, ROWS, {OLD.get(name, name): value for name, value in given.items()}, lost=lost
    )
    lines = [dataclasses.replace(line, theirs=written.get(line.theirs, line.theirs)) for line in conversion.lines]
    origins = {path: written.get(theirs, theirs) for path, theirs in conversion.origins.items()}
    return dataclasses.replace(conversion, lines=lines, origins=origins)


def _parts(ours: str, **defaults: Any) -> dict[str, Row]:
    return {name.replace("__", "."): Row(default, part_of(ours)) for name, default in defaults.items()}


ROWS: dict[str, Row] = {
    "logger.wandb.run_name": Row(None, meanings.name, also=("ckpt.output_dir",)),
    "ckpt.output_dir": Row("./ckpt", meanings.output),
    # model
    "actor.model_name_or_path": Row(None, meanings.model),
    "ds.param_dtype": Row(
        "bf16",
        one_of(
            "model.dtype",
            {"bf16": "bfloat16", True: "bfloat16"},
            "weights are float32 or bfloat16; bfloat16 is written",
            "bfloat16",
        ),
    ),
    "ds.lora.rank": Row(0, meanings.lora),
    **_parts("model.lora", ds__lora__alpha=16, ds__lora__target_modules="all-linear", ds__lora__dropout=0),
    "actor.gradient_checkpointing_enable": Row(False, to("learning.gradientCheckpointing")),
    # data and rewards
    "data.prompt_dataset": Row(None, meanings.dataset),
    **_parts("data.split", data__prompt_split="train"),
    "data.input_key": Row("input", to("data.promptColumn")),
    "data.label_key": Row(None, to("data.groundTruthColumn")),
    "data.apply_chat_template": Row(False, meanings.template),
    "reward.remote_url": Row(None, meanings.rewards, also=("reward.model_name_or_path",)),
    **_parts("rewards", reward__model_name_or_path=None, reward__overlong_buffer_len=None),
    **_parts("rewards", reward__overlong_penalty_factor=1),
    # algorithm
    "algo.advantage.estimator": Row("gae", meanings.advantage),
    **_parts("algorithm.advantageNormalization", algo__advantage__no_std_norm=False),
    "algo.advantage.gamma": Row(1, meanings.gamma),
    "algo.advantage.lambd": Row(1, meanings.of_gae("algorithm.gaeLambda")),
    "actor.policy_loss_type": Row("ppo", meanings.loss),
    "actor.eps_clip": Row(0.2, meanings.clip_low, also=("actor.eps_clip_low_high",)),
    "actor.eps_clip_low_high": Row(None, meanings.clip_high),
    "actor.dual_clip": Row(None, to("algorithm.dualClip")),
    "actor.entropy_coef": Row(None, to("algorithm.entropyCoefficient")),
    "critic.value_clip": Row(0.5, meanings.of_gae("algorithm.critic.valueClip")),
    "critic.adam.lr": Row(9e-6, meanings.of_gae("algorithm.critic.learningRate")),
    "critic.freezing_steps": Row(-1, meanings.critic_warmup),
    "critic.model_name_or_path": Row(None, meanings.critic_model),
    "algo.kl.init_coef": Row(0.01, meanings.kl),
    **_parts("algorithm.kl", algo__kl__use_loss=False, algo__kl__estimator="k1"),
    "algo.advantage.is_correction_enable": Row(False, meanings.correction),
    "algo.advantage.is_correction_threshold": Row([0.5, 5.0], part_of("algorithm.importanceSampling")),
    "algo.advantage.is_correction_type": Row("tis", part_of("algorithm.importanceSampling")),
    "algo.dynamic_filtering_enable": Row(False, meanings.filtering),
    "algo.dynamic_filtering_range": Row([0, 1], part_of("algorithm.dynamicSamplingRounds")),
    "train.max_epochs": Row(1, to("algorithm.epochs")),
    # sampling and batch
    "rollout.temperature": Row(1.0, to("sampling.temperature")),
    "rollout.max_new_tokens": Row(None, meanings.longest_response),
    "data.max_len": Row(2048, meanings.longest_prompt, also=("data.prompt_max_len",)),
    "data.prompt_max_len": Row(None, part_of("sampling.maxPromptTokens")),
    "rollout.batch_size": Row(1024, to("batch.promptsPerStep")),
    "rollout.n_samples_per_prompt": Row(1, to("batch.samplesPerPrompt")),
    "train.batch_size": Row(128, meanings.minibatch),
    "train.max_tokens_per_gpu": Row(16192, meanings.microbatch),
    **_parts("batch.microbatchTokens", train__dynamic_batch_enable=False),
    # optimizer
    "actor.optim": Row("adam", one_of("optimizer.name", {"adam": "adamw"}, "AdamW is written", "adamw")),
    "actor.adam.lr": Row(1e-6, to("optimizer.learningRate")),
    "actor.adam.betas": Row([0.9, 0.95], meanings.betas),
    "actor.adam.eps": Row(1e-8, to("optimizer.epsilon")),
    "actor.adam.weight_decay": Row(0.0, to("optimizer.weightDecay")),
    "actor.lr_scheduler": Row("cosine_with_min_lr", meanings.schedule),
    "actor.min_lr_ratio": Row(0.1, meanings.final_ratio),
    "actor.lr_warmup_ratio": Row(0.03, meanings.warmup),
    "actor.max_norm": Row(1.0, to("optimizer.maxGradientNorm")),
    # the run
    "train.num_episodes": Row(1, to("epochs")),
    "train.seed": Row(42, to("seed")),
    "train.async_enable": Row(False, meanings.asynchronous),
    **_parts("async", train__async_queue_size=1, train__partial_rollout_enable=False),
    "vllm.num_engines": Row(None, meanings.engines),
    "vllm.tensor_parallel_size": Row(1, to("generation.vllm.tensorParallelSize")),
    "eval.dataset": Row(None, meanings.evaluation),
    **_parts("evaluation", eval__steps=-1, eval__split="train", eval__temperature=0.6, eval__n_samples_per_prompt=4),
    "ckpt.save_steps": Row(-1, meanings.checkpoints),
    "ckpt.max_num": Row(3, to("checkpoints.keep")),
    "logger.wandb.key": Row(None, meanings.tracker),
    **_parts("tracking.wandb", logger__wandb__project="openrlhf_train_ppo"),
    "logger.tensorboard_dir": Row(None, meanings.tensorboard),
    "data.prompt_probs": Row(None, meanings.shares),
    **OTHERS,
}
"""Rows of all arguments, each with its default and its conversion."""
