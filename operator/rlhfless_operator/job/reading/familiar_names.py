"""Names of settings in TRL, verl and OpenRLHF, and their names in rlhfless."""

FIELDS: dict[str, tuple[str, ...]] = {
    "model.source": ("model_name_or_path", "model_path", "pretrain", "model_id", "base_model"),
    "model.revision": ("model_revision",),
    "model.tokenizer": ("tokenizer_path", "tokenizer_name", "tokenizer_name_or_path", "processing_class"),
    "model.chatTemplate": ("chat_template_path", "custom_chat_template", "apply_chat_template"),
    "model.dtype": ("torch_dtype", "bf16", "fp16", "precision", "param_dtype"),
    "model.lora": ("use_peft", "use_lora", "peft_config"),
    "model.lora.rank": ("lora_r", "lora_rank", "r"),
    "model.lora.alpha": ("lora_alpha",),
    "model.lora.dropout": ("lora_dropout",),
    "model.lora.targetModules": ("lora_target_modules",),
    "algorithm.name": ("algo", "trainer"),
    "algorithm.advantage": ("adv_estimator", "advantage_estimator"),
    "algorithm.advantageNormalization": (
        "multi_objective_aggregation",
        "scale_rewards",
        "norm_adv_by_std_in_grpo",
        "no_advantage_std_norm",
        "whiten_rewards",
        "normalize_advantages",
    ),
    "algorithm.gamma": ("discount",),
    "algorithm.gaeLambda": ("lam", "lambd"),
    "algorithm.ratioLevel": ("importance_sampling_level",),
    "algorithm.clip": ("loss_mode",),
    "algorithm.clipLow": ("clip_ratio_low", "eps_clip_low", "epsilon_low"),
    "algorithm.clipLow and spec.algorithm.clipHigh": (
        "epsilon",
        "clip_ratio",
        "cliprange",
        "clip_range",
        "eps_clip",
        "eps_clip_low_high",
    ),
    "algorithm.clipHigh": ("epsilon_high", "clip_ratio_high", "eps_clip_high"),
    "algorithm.dualClip": ("clip_ratio_c", "delta"),
    "algorithm.aggregation": ("loss_agg_mode", "loss_type", "loss_aggregation"),
    "algorithm.kl.coefficient": ("beta", "kl_loss_coef", "init_kl_coef", "kl_coef", "kl_ctrl"),
    "algorithm.kl.placement": ("use_kl_loss", "use_kl_in_reward"),
    "algorithm.kl.estimator": ("kl_loss_type", "kl_estimator", "kl_penalty"),
    "algorithm.entropyCoefficient": ("entropy_coeff", "entropy_coef", "entropy_loss_coef", "ent_coef"),
    "algorithm.epochs": ("num_iterations", "ppo_epochs", "num_ppo_epochs", "max_epochs"),
    "algorithm.importanceSampling.mode": (
        "vllm_importance_sampling_correction",
        "enable_vllm_is_correction",
        "rollout_is_mode",
    ),
    "algorithm.importanceSampling.mode and spec.algorithm.importanceSampling.level": ("vllm_importance_sampling_mode",),
    "algorithm.importanceSampling.level": ("rollout_is", "rollout_is_level", "vllm_is_correction_type"),
    "algorithm.importanceSampling.low": ("vllm_importance_sampling_clip_min", "rollout_is_threshold_lower"),
    "algorithm.importanceSampling.high": (
        "cap",
        "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_cap",
        "tis_imp_ratio_cap",
        "vllm_is_truncated_threshold",
        "rollout_is_threshold",
    ),
    "algorithm.importanceSampling.rejection": ("rollout_rs", "rejection_sampling", "behav_imp_weight_cap"),
    "algorithm.importanceSampling.rejection.level": ("rollout_rs_level",),
    "algorithm.importanceSampling.rejection.low and spec.algorithm.importanceSampling.rejection.high": (
        "rollout_rs_threshold",
    ),
    "algorithm.proximalPolicy": ("bypass_mode", "use_decoupled_loss", "prox_logp_method"),
    "algorithm.sapoTemperaturePositive": ("sapo_temperature_pos", "tau_pos"),
    "algorithm.sapoTemperatureNegative": ("sapo_temperature_neg", "tau_neg"),
    "algorithm.critic": ("value_model", "critic_pretrain"),
    "algorithm.critic.learningRate": ("critic_learning_rate", "critic_lr"),
    "algorithm.critic.valueClip": ("cliprange_value", "vf_clip"),
    "algorithm.critic.warmupSteps": ("critic_warmup", "freezing_actor_steps"),
    "algorithm.dynamicSamplingRounds": (
        "dynamic_filtering",
        "filter_groups",
        "max_num_gen_batches",
        "dynamic_sampling",
    ),
    "algorithm.maskTruncated": ("mask_truncated_completions", "overlong_filter"),
    "rewards": ("reward", "reward_funcs", "reward_functions", "reward_model", "reward_manager"),
    "rewards[].weight": ("reward_weights",),
    "rewards[].python": ("custom_reward_function", "compute_score"),
    "rewards[].http": ("remote_rm_url",),
    "rewards[].model": ("reward_model_path", "reward_pretrain", "reward_model_name"),
    "rewards[].length.bufferTokens": ("overlong_buffer", "overlong_buffer_len"),
    "data.source": (
        "dataset",
        "dataset_name",
        "train_dataset",
        "train_files",
        "prompt_data",
        "data_path",
        "path",
        "files",
    ),
    "data.promptColumn": ("input_key", "prompt_key"),
    "data.groundTruthColumn": ("label_key", "answer_key"),
    "data.systemPrompt": ("system",),
    "data.chatTemplateKwargs": ("chat_template_kwargs", "apply_chat_template_kwargs"),
    "data.longPrompts": ("filter_overlong_prompts", "truncation"),
    "data.shuffle": ("shuffle_dataset",),
    "sampling.temperature": ("sampling_temperature",),
    "sampling.maxPromptTokens": ("max_prompt_length", "prompt_max_len", "max_prompt_len"),
    "sampling.maxResponseTokens": (
        "max_completion_length",
        "max_response_length",
        "response_length",
        "generate_max_len",
        "max_new_tokens",
        "max_tokens",
        "max_length",
    ),
    "sampling.stop": ("stop_strings", "stop_words", "stop_token"),
    "batch.promptsPerStep": ("train_batch_size", "rollout_batch_size", "generation_batch_size", "batch_size"),
    "batch.samplesPerPrompt": (
        "num_generations",
        "n",
        "rollout_n",
        "n_samples_per_prompt",
        "group_size",
        "num_samples",
    ),
    "batch.minibatchSamples": ("ppo_mini_batch_size", "mini_batch_size", "num_mini_batches"),
    "batch.microbatchTokens": (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "micro_train_batch_size",
        "micro_rollout_batch_size",
        "micro_batch_size",
        "ppo_micro_batch_size",
        "ppo_micro_batch_size_per_gpu",
        "ppo_max_token_len_per_gpu",
        "max_tokens_per_gpu",
    ),
    "optimizer.name": ("optim", "optimizer_type"),
    "optimizer.learningRate": ("lr", "actor_learning_rate", "actor_lr"),
    "optimizer.beta1 and spec.optimizer.beta2": ("betas", "adam_betas"),
    "optimizer.beta1": ("adam_beta1",),
    "optimizer.beta2": ("adam_beta2",),
    "optimizer.epsilon": ("eps", "adam_epsilon", "adam_eps"),
    "optimizer.weightDecay": ("l2", "wd"),
    "optimizer.schedule": ("lr_scheduler_type", "lr_scheduler", "lr_warmup_style", "lr_schedule"),
    "optimizer.warmupSteps": (
        "warmup_ratio",
        "lr_warmup_steps",
        "lr_warmup_ratio",
        "lr_warmup_steps_ratio",
        "num_warmup_steps",
    ),
    "optimizer.finalRatio": ("min_lr_ratio", "min_lr"),
    "optimizer.maxGradientNorm": ("max_grad_norm", "grad_clip", "clip_grad", "max_norm", "gradient_clipping"),
    "learning.gradientCheckpointing": ("enable_gradient_checkpointing", "use_gradient_checkpointing"),
    "async.maxStaleness": (
        "max_staleness",
        "max_staleness_steps",
        "max_head_offpolicyness",
        "max_off_policy_steps",
        "max_off_policy_threshold",
        "max_trajectory_age_steps",
        "async_generation_ratio",
    ),
    "steps": ("max_steps", "total_training_steps", "num_steps", "total_steps"),
    "epochs": ("num_train_epochs", "total_epochs", "num_epochs", "num_episodes"),
    "seed": ("data_seed", "random_seed"),
    "generation.instances.max": (
        "num_actors",
        "actors",
        "replicas",
        "num_engines",
        "vllm_num_engines",
        "rollout_replicas",
    ),
    "evaluation.data": ("eval_dataset", "val_files", "eval_data"),
    "evaluation.everySteps": ("eval_steps", "test_freq", "eval_interval"),
    "checkpoints.everySteps": ("save_steps", "save_freq", "save_interval"),
    "checkpoints.keep": ("save_total_limit", "max_ckpt_num", "max_actor_ckpt_to_keep"),
    "checkpoints.best": ("load_best_model_at_end", "save_best"),
    "artifacts.uri": ("output_dir", "save_path", "ckpt_path", "default_local_dir", "checkpoint_dir"),
    "tracking": ("report_to", "logger", "loggers", "logging"),
    "tracking.wandb.project": ("wandb_project", "project_name"),
    "tracking.wandb": ("use_wandb",),
    "tracking.tensorboard": ("use_tensorboard", "tensorboard_dir", "logging_dir"),
}
"""Fields below `spec`, and their names in other frameworks."""

METADATA_NAMES = ("run_name", "experiment_name", "exp_name", "wandb_run_name")
"""Names of `metadata.name` in other frameworks."""

WITHOUT_COUNTERPART = {
    "top_p": "rlhfless samples from the full distribution, because log-probabilities refer to it",
    "top_k": "rlhfless samples from the full distribution, because log-probabilities refer to it",
    "min_p": "rlhfless samples from the full distribution, because log-probabilities refer to it",
    "repetition_penalty": "rlhfless samples from the full distribution, because log-probabilities refer to it",
    "use_vllm": "the engine belongs to the generation function, not to the job",
    "actor_rollout_ref": "rlhfless convert turns verl's file into a job, with sections such as model and batch",
}
"""Fields of other frameworks that a job does not have, and the reason."""

VALUES = {
    "reinforce++": "reinforce_plus_plus",
    "geo_mean": "gmpo",
    "vanilla": "ppo",
    "sequence": "sequence_product",
    "geometric": "geometric_mean",
    "tis": "truncate",
    "icepop": "mask",
    "mis": "mask",
    "dr.grpo": "dr_grpo",
    "drgrpo": "dr_grpo",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "adam": "adamw",
    "adamw_torch": "adamw",
    "kl": "k1",
    "mse": "k2",
    "low_var_kl": "k3",
    "seq-mean-token-sum": "seq-mean-token-sum-norm",
    "grpo": "group",
    "rloo": "leave_one_out",
    "reinforce": "discounted",
    "reinforce_plus_plus": "discounted",
    "group_norm": "group",
    "json": "jsonl",
}
"""Names of a field's choices in other frameworks."""


def normal(name: str) -> str:
    """Return a name in a form in which snake_case and camelCase are equal."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


_BY_NAME = {normal(theirs): f"spec.{ours}" for ours, names in FIELDS.items() for theirs in names}
_BY_NAME.update(dict.fromkeys(map(normal, METADATA_NAMES), "metadata.name"))
_REASONS = {normal(theirs): reason for theirs, reason in WITHOUT_COUNTERPART.items()}


def our_field(name: str) -> str | None:
    """Return the path of the field that others call `name`: in snake_case, camelCase or as the end of a dotted path."""
    return _BY_NAME.get(normal(name)) or _BY_NAME.get(normal(name.rpartition(".")[2]))


def reason_for_absence(name: str) -> str | None:
    """Return the reason why rlhfless does not have a field of another framework; None if there is none."""
    return _REASONS.get(normal(name))


def our_choice(value: str, choices: tuple[str, ...]) -> str | None:
    """Return the choice that other frameworks call `value`, or the choice that it is."""
    ours = value if value in choices else VALUES.get(value.lower())
    return ours if ours in choices else None
