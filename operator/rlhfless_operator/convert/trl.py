"""The table of TRL's configuration of GRPO, as for `trl grpo --config`.

Fields, defaults and meanings are those of TRL 1.16 with transformers 5 (`GRPOConfig`, `ModelConfig`,
`GRPOScriptArguments`). The table also has names from older releases.
"""

from collections.abc import Mapping
from typing import Any

from rlhfless_operator.convert import trl_algorithm as algorithm
from rlhfless_operator.convert import trl_environments as environments
from rlhfless_operator.convert import trl_meanings as meanings
from rlhfless_operator.convert.conversion import (
    Conversion,
    Row,
    Unneeded,
    convert_rows,
    one_of,
    part_of,
    renamed,
    to,
    trackers,
    without,
)
from rlhfless_operator.convert.trl_others import OTHERS


def convert_trl(
    given: Mapping[str, Any], source: str, processes: int | None = 1, lost: Mapping[str, str] | None = None
) -> Conversion:
    """Convert TRL's configuration to a job.

    Args:
        given: its fields.
        source: name of its file.
        processes: number of processes that it is launched with (`accelerate launch --num_processes`), None if nobody
            has said; `num_processes` in the configuration overrides it.
        lost: parts of the file that are no fields, and why they were not converted.
    """
    named = given.get("num_processes")
    launched = named if isinstance(named, int) and named > 0 else processes
    number = launched or 1
    peer = f"TRL 1.16 with {number} process{'es' if number > 1 else ''}"
    return convert_rows(peer, source, ROWS, given, launched, lost)


ROWS: dict[str, Row] = {
    "run_name": Row(None, meanings.name, also=("output_dir",)),
    "output_dir": Row(None, meanings.output),
    # model
    **renamed({"model_name_or_path": None}),
    "model_revision": Row(
        "main", lambda value, theirs: None if value == "main" else to("model.revision")(value, theirs)
    ),
    "dtype": Row("float32", meanings.dtype, also=("torch_dtype",)),
    "torch_dtype": Row(None, part_of("model.dtype")),
    "model_init_kwargs": Row(None, without("only its dtype is converted")),
    "bf16": Row(None, meanings.bf16),
    "fp16": Row(False, without("there is no float16; bfloat16 is learning.autocast", False)),
    "use_peft": Row(False, lambda value, theirs: Unneeded("model.lora is there") if value else None),
    "lora_r": Row(16, meanings.lora("rank", int)),
    "lora_alpha": Row(32, meanings.lora("alpha", float)),
    "lora_dropout": Row(0.05, meanings.lora("dropout", float)),
    "lora_target_modules": Row(None, meanings.lora_targets),
    "gradient_checkpointing": Row(True, to("learning.gradientCheckpointing")),
    # data and rewards
    "dataset_name": Row(None, meanings.dataset, also=meanings.MIXTURES),
    **{name: Row(None, part_of("data.sources")) for name in meanings.MIXTURES},
    "test_split_size": Row(None, without("write the rows that are held out into a file of their own")),
    "dataset_config": Row(None, part_of("data.subset")),
    "dataset_train_split": Row("train", part_of("data.split")),
    "dataset_test_split": Row("test", part_of("evaluation.data.split")),
    "eval_dataset": Row(None, part_of("evaluation.data, if eval_strategy asks for an evaluation")),
    **renamed({"shuffle_dataset": True, "chat_template_kwargs": None}),
    "max_prompt_length": Row(None, meanings.longest_prompt, also=("vllm_max_model_length",)),
    "reward_funcs": Row(None, meanings.rewards, also=("reward_model_name_or_path",)),
    "tools": Row(None, environments.tools),
    "environment_factory": Row(None, environments.factory),
    "max_tool_calling_iterations": Row(None, environments.turns, also=("tools", "environment_factory")),
    "reward_model_name_or_path": Row(None, part_of("rewards")),
    "reward_weights": Row(None, part_of("rewards")),
    # what scripts around TRL have, such as open-r1's
    "system_prompt": Row(None, to("data.systemPrompt")),
    "dataset_prompt_column": Row(None, to("data.promptColumn")),
    "chat_template": Row(None, to("model.chatTemplate")),
    # algorithm
    "loss_type": Row("dapo", algorithm.loss),
    "scale_rewards": Row("group", algorithm.scaling, also=("multi_objective_aggregation",)),
    "importance_sampling_level": Row(
        "token", one_of("algorithm.ratioLevel", {"token": "token", "sequence": "sequence"}, "it is no level")
    ),
    "epsilon": Row(0.2, algorithm.clip_low),
    "epsilon_high": Row(None, algorithm.clip_high),
    "sapo_temperature_pos": Row(1.0, algorithm.sapo_temperature("sapoTemperaturePositive")),
    "sapo_temperature_neg": Row(1.05, algorithm.sapo_temperature("sapoTemperatureNegative")),
    **renamed({"delta": None}),
    "beta": Row(0.0, algorithm.kl),
    "use_bias_correction_kl": Row(True, lambda value, theirs: Unneeded("part of algorithm.kl, which has no weights")),
    **renamed({"num_iterations": 1, "entropy_coef": 0.0, "mask_truncated_completions": False}),
    "vllm_importance_sampling_mode": Row("sequence_mask", algorithm.importance_sampling, also=algorithm.CORRECTION),
    # sampling and batch
    "temperature": Row(1.0, to("sampling.temperature")),
    **renamed({"max_completion_length": 512, "num_generations": 8}),
    "per_device_train_batch_size": Row(8, meanings.prompts),
    "gradient_accumulation_steps": Row(1, meanings.minibatch),
    "steps_per_generation": Row(None, meanings.generation_size),
    "generation_batch_size": Row(None, meanings.generation_size),
    # optimizer
    "optim": Row(
        "adamw_torch_fused",
        one_of(
            "optimizer.name",
            dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf", "adamw"), "adamw"),
            "optimizers are adamw and muon; adamw is written instead",
            "adamw",
        ),
    ),
    "learning_rate": Row(1e-6, to("optimizer.learningRate")),
    **renamed({"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}),
    "weight_decay": Row(0.0, to("optimizer.weightDecay")),
    **renamed({"max_grad_norm": 1.0}),
    "lr_scheduler_type": Row(
        "linear",
        one_of("optimizer.schedule", meanings.SCHEDULES, "schedules are constant, linear and cosine", "constant"),
    ),
    "lr_scheduler_kwargs": Row(None, meanings.final_ratio),
    "warmup_steps": Row(0, meanings.warmup, also=("warmup_ratio",)),
    "warmup_ratio": Row(None, part_of("optimizer.warmupSteps")),
    # the run
    "max_steps": Row(-1, meanings.max_steps),
    "num_train_epochs": Row(3.0, meanings.epochs),
    "seed": Row(42, to("seed")),
    "use_vllm": Row(False, meanings.continuous),
    "vllm_tensor_parallel_size": Row(None, to("generation.vllm.tensorParallelSize")),
    "eval_strategy": Row("no", meanings.evaluation),
    "save_steps": Row(None, meanings.checkpoints),
    **renamed({"save_total_limit": None}),
    "load_best_model_at_end": Row(
        False, lambda value, theirs: to("checkpoints.best")(value, theirs) if value else None
    ),
    "report_to": Row(
        "none", lambda value, theirs: trackers(value, theirs["wandb_project"] or theirs["project"], "none")
    ),
    **OTHERS,
}
"""Rows of all fields, each with its default and its conversion."""
