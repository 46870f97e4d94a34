"""TRL's fields without a field in a job: those without effect, unsupported ones, and parts of others."""

from collections.abc import Iterable
from typing import Any

from rlhfless_operator.convert.conversion import Row, part_of, unneeded, without


def _rows(names: str, reason: str) -> Iterable[tuple[str, Row]]:
    return ((name, Row(None, unneeded(reason))) for name in names.split())


def _lacking(defaults: dict[str, Any], reason: str) -> Iterable[tuple[str, Row]]:
    return ((name, Row(default, without(reason, default))) for name, default in defaults.items())


_WHOLE = "rlhfless samples from the full distribution, because log-probabilities refer to it"

OTHERS: dict[str, Row] = dict(
    [
        *_rows(
            "logging_steps logging_strategy logging_first_step logging_nan_inf_filter logging_dir log_on_each_node"
            " log_level log_level_replica disable_tqdm include_num_input_tokens_seen",
            "every step is in metrics.jsonl, on the console and in spec.tracking",
        ),
        *_rows(
            "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo",
            "responses are in samples.jsonl and in the report of each run",
        ),
        *_rows(
            "fsdp fsdp_config deepspeed ds3_gather_for_generation parallelism_config accelerator_config ddp_backend"
            " ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph"
            " average_tokens_across_devices local_rank accelerate_config config_file num_processes save_on_each_node",
            "GPUs that share a model are learning.processes and generation.vllm.tensorParallelSize",
        ),
        *_rows(
            "dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
            " dataloader_multiprocessing_context dataloader_in_order dataloader_drop_last remove_unused_columns"
            " label_names train_sampling_strategy length_column_name dataset_streaming streaming pad_to_multiple_of",
            "prompts are read once; all columns go to the rewards",
        ),
        *_rows(
            "per_device_eval_batch_size eval_accumulation_steps eval_delay eval_on_start eval_do_concat_batches"
            " eval_use_gather_object prediction_loss_only batch_eval_metrics include_for_metrics do_train do_eval"
            " do_predict bf16_full_eval fp16_full_eval",
            "evaluation runs before the first step, after the last, and every evaluation.everySteps",
        ),
        *_rows(
            "save_strategy save_only_model enable_jit_checkpoint resume_from_checkpoint ignore_data_skip"
            " restore_callback_states_from_checkpoint",
            "a job resumes from its checkpoints automatically",
        ),
        *_rows(
            "gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode torch_empty_cache_steps use_cache"
            " use_liger_kernel liger_kernel_config attn_implementation tf32 use_cpu cache_implementation"
            " skip_memory_metrics debug auto_find_batch_size full_determinism",
            "it only affects speed or memory: see spec.learning",
        ),
        *_rows(
            "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_base_url vllm_server_host vllm_server_port"
            " vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length"
            " use_transformers_paged use_transformers_continuous_batching transformers_continuous_batching_config",
            "engines are started by the job: see spec.generation",
        ),
        *_rows("trackio_space_id trackio_bucket_id trackio_static_space_id", "see spec.tracking for what there is"),
        *((name, Row(None, part_of("evaluation"))) for name in ("num_generations_eval", "eval_steps")),
        ("project", Row("huggingface", part_of("tracking.wandb"))),
        ("wandb_project", Row(None, part_of("tracking.wandb"))),
        *_rows("wandb_entity wandb_run_group", "see tracking.wandb, and wandb's own variables"),
        *_rows(
            "overwrite_output_dir overwrite_hub_revision push_to_hub_revision hub_model_revision",
            "the model is left in the job's folder, model/",
        ),
        *_lacking({"benchmarks": None, "callbacks": None}, "its script has it, and a job does not"),
        *_lacking(
            {
                "cosine_min_value_wrong": 0.0,
                "cosine_max_value_wrong": -0.5,
                "cosine_min_value_correct": 0.5,
                "cosine_max_value_correct": 1.0,
                "cosine_max_len": 1000,
                "repetition_n_grams": 3,
                "repetition_max_penalty": -1.0,
                "max_completion_len": 16384,
                "soft_punish_cache": 4096,
                "code_language": "python",
                "code_eval_test_batch_size": 1,
                "code_eval_scoring_mode": "weighted_sum",
                "parallel_code_exec_per_proc": 2,
                "code_provider": "e2b",
            },
            "it is an argument of a reward of its script: write it into that function",
        ),
        *(
            (name, Row(default, part_of("algorithm.importanceSampling")))
            for name, default in {
                "vllm_importance_sampling_correction": True,
                "vllm_importance_sampling_clip_max": 3.0,
                "vllm_importance_sampling_clip_min": None,
                "vllm_importance_sampling_cap": None,
            }.items()
        ),
        *_lacking({"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0}, _WHOLE),
        *_lacking({"generation_kwargs": None, "vllm_structured_outputs_regex": None}, _WHOLE),
        *_lacking(
            {"sync_ref_model": False, "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512},
            "the reference policy stays the model that training began with",
        ),
        *_lacking({"top_entropy_quantile": 1.0}, "all tokens are in the loss"),
        *_lacking(
            {
                "use_adaptive_entropy": False,
                "entropy_coef_min": 0.0,
                "entropy_coef_max": 1.0,
                "entropy_coef_delta": 0.005,
                "entropy_target": 0.2,
            },
            "algorithm.entropyCoefficient does not adapt",
        ),
        *_lacking(
            {
                "vespo_k_pos": 2.0,
                "vespo_lambda_pos": 3.0,
                "vespo_k_neg": 3.0,
                "vespo_lambda_neg": 2.0,
            },
            "its loss is not converted",
        ),
        *_lacking({"off_policy_mask_threshold": None}, "no sequence is masked for its KL"),
        ("multi_objective_aggregation", Row("sum_then_normalize", part_of("algorithm.advantageNormalization"))),
        *_lacking({"data_seed": None}, "one seed is for everything"),
        *_lacking({"disable_dropout": False}, "policies are trained without dropout"),
        *_lacking({"router_aux_loss_coef": None}, "the routers of experts get no loss of their own"),
        *_lacking({"cast_lm_head_to_fp32": False}, "logits are float32, the output layer is as the model's dtype"),
        *_lacking({"trust_remote_code": False}, "models with code of their own are refused"),
        *_lacking({"torch_compile": False}, "set learning.compile; the update is the same up to rounding"),
        *_lacking({"optim_args": None, "optim_target_modules": None}, "see spec.optimizer for what there is"),
        *_lacking({"label_smoothing_factor": 0.0, "neftune_noise_alpha": None}, "it only affects supervised training"),
        *_lacking(
            {
                "lora_target_parameters": None,
                "lora_modules_to_save": None,
                "use_rslora": False,
                "use_dora": False,
                "load_in_8bit": False,
                "load_in_4bit": False,
            },
            "adapters are plain LoRA on weights that are not quantized",
        ),
        *_rows(
            "lora_task_type bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage ignore_bias_buffers",
            "it belongs to what is not there",
        ),
        *_lacking({"push_to_hub": False}, "the model is left in the job's folder, model/"),
        *_rows(
            "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision",
            "the model is left in the job's folder, model/",
        ),
        *_lacking({"metric_for_best_model": None, "greater_is_better": None}, "the best have the highest reward"),
    ]
)
"""Rows by the name of the field."""
