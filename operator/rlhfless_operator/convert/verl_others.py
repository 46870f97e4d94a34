"""verl's fields without a field in a job: each by its name, with the reason. `verl_engines` has those of its"
" engines."""

from collections.abc import Iterator
from typing import Any

from rlhfless_operator.convert.conversion import Row, unneeded, without
from rlhfless_operator.convert.shell.patterns import expand_braces

_WHOLE = "rlhfless samples from the full distribution, because log-probabilities refer to it"
_ONE_TURN = "there are no turns and no tools"
_ROWS = "take the rows into a file of their own"


def rows(names: str, reason: str) -> Iterator[tuple[str, Row]]:
    """Return rows of fields without effect; names may have braces as in a shell."""
    return ((name, Row(None, unneeded(reason))) for word in names.split() for name in expand_braces(word))


def lost(defaults: dict[str, Any], reason: str) -> Iterator[tuple[str, Row]]:
    """Return rows of fields that are left to the user unless they have their default; names may have braces."""
    return (
        (name, Row(default, without(reason, *_harmless(default))))
        for names, default in defaults.items()
        for name in expand_braces(names)
    )


def _harmless(default: Any) -> tuple[Any, ...]:
    if default in ("naive", None):
        return (default, "naive", "dapo")
    return (default, -1, 0) if default == -1 else (default,)


_FIELDS = [
    # sampling and evaluation
    *lost({"actor_rollout_ref.rollout.{top_k,val_kwargs.top_k}": -1}, _WHOLE),
    *lost({"actor_rollout_ref.rollout.{top_p,val_kwargs.top_p}": 1, "actor_rollout_ref.rollout.min_p": 0}, _WHOLE),
    *lost({"actor_rollout_ref.rollout.do_sample": True}, "training samples; it does not take the likeliest tokens"),
    *lost({"actor_rollout_ref.rollout.ignore_eos": False}, "responses end at the end-of-sequence token"),
    *lost({"actor_rollout_ref.rollout.over_sample_rate": 0}, "each step has the samples that it asks for"),
    *lost({"actor_rollout_ref.rollout.multi_turn.enable": False}, _ONE_TURN),
    *lost({"actor_rollout_ref.rollout.agent.default_agent_loop": "single_turn_agent"}, _ONE_TURN),
    *lost({"actor_rollout_ref.rollout.agent.{agent_loop_config_path,custom_async_server.path}": None}, _ONE_TURN),
    *lost({"actor_rollout_ref.rollout.multi_turn.{tool_config_path,function_tool_path,interaction_config_path}": None,
           "data.{tool_config_path,function_tool_path}": None}, _ONE_TURN),
    *rows("actor_rollout_ref.rollout.multi_turn.{max_assistant_turns,max_user_turns,max_turns,max_parallel_calls,"
          "max_tool_response_length,tool_response_truncate_side,use_inference_chat_template,completion_callback,"
          "format,"
          "tokenization_sanity_check_mode,num_repeat_rollouts,enable_tokenization_sanity_check}"
          " actor_rollout_ref.rollout.agent.{num_workers,custom_async_server.name}",
          "it belongs to turns, which multi_turn.enable has"),
    *lost({"actor_rollout_ref.rollout.enable_rollout_routing_replay": False,
           "{actor_rollout_ref.{actor,ref},critic}{,.megatron,.veomni}.router_replay.mode": "disabled"},
          "the learner routes tokens anew"),
    *lost({"actor_rollout_ref.rollout.quantization_config_file": None}, "see generation.vllm.quantization"),
    *lost({"actor_rollout_ref.rollout.logprobs_mode": "processed_logprobs"},
          "log-probabilities are those at the temperature"),
    # data
    *lost({"data.{train,val}_max_samples": -1}, _ROWS),
    *lost({"data.{custom_cls,sampler.class,datagen}{.path,_path}": None}, "data are files; see spec.data"),
    *lost({"data.tokenizer": None}, "see model.tokenizer"),
    *lost({"data.gen_batch_size": None}, "each round of dynamic sampling draws as many prompts as were lost"),
    *lost({"data.reward_fn_key": "data_source"}, "verl's rewards get the column data_source: name it so"),
    *lost({"data.trust_remote_code": False, "{actor_rollout_ref.model,critic.model,"
          "reward_model.model}.trust_remote_code": False},
          "models and tokenizers with code of their own are refused"),
    *rows("data.{dataloader_num_workers,filter_overlong_prompts_workers,use_shm,val_batch_size,validation_shuffle}",
          "prompts are read once, and an evaluation takes them all"),
    *rows("data.{return_raw_input_ids,return_raw_chat,return_full_prompt}", "rewards get prompts, chats and columns"),
    *rows("data.{image_key,video_key,audio_key,image_patch_size,return_multi_modal_inputs,mm_processor_kwargs}"
          " data.custom_cls.name {actor_rollout_ref.actor,actor_rollout_ref.model}.{freeze_vision_tower,"
          "freeze_vision_model}", "prompts are text"),
    # rewards
    *lost({"reward.reward_manager.name": "naive", "reward_model.reward_manager": None},
          "rewards are terms that are summed"),
    *lost({"{reward.,}sandbox_fusion.url": None, "reward_model.sandbox_fusion.url": None},
          "its scorer sends programs to a sandbox of its own: see the reward code"),
    *lost({"reward.reward_manager.source": "register",
           "reward.reward_manager.module.path": None,
           "reward_model.reward_loop_{source,module_path,class_name}": None}, "rewards are terms that are summed"),
    *rows("{reward.,reward_model.,}sandbox_fusion.{max_concurrent,memory_limit_mb} reward.reward_manager.module.name"
          " {reward,reward_model}.{num_workers,launch_reward_fn_async}", "rewards run in workers of their own"),
    *rows("{reward.reward_model,reward_model}.{enable_resource_pool,n_gpus_per_node,nnodes,strategy,micro_batch_size,"
          "micro_batch_size_per_gpu,max_length,ulysses_sequence_parallel_size,use_dynamic_bsz,"
          "forward_max_token_len_per_gpu}"
          " reward_model.model.{external_lib,use_remove_padding,use_shm,fsdp_config.param_offload,"
          "fsdp_config.fsdp_size}",
          "reward models are loaded by the preparation function, with the batches of spec.batch"),
    *lost({"reward_model.model.input_tokenizer": None}, "a reward model gets the chat by its own tokenizer's"
          " template"),
    # algorithm
    *lost({"algorithm.use_pf_ppo": False}, "samples are not drawn again by their reward"),
    *rows("algorithm.pf_ppo.{reweight_method,weight_pow}", "it belongs to use_pf_ppo"),
    *lost({"algorithm.kl_ctrl.type": "fixed"}, "the coefficient stays as it is"),
    *rows("algorithm.kl_ctrl.{horizon,target_kl}", "it belongs to kl_ctrl.type: adaptive"),
    *lost({"algorithm.rollout_correction.rollout_is_batch_normalize": False},
          "weights are not normalized over the batch"),
    *lost({"algorithm.rollout_correction.rollout_token_veto_threshold": None,
          "algorithm.rollout_is_veto_threshold": None},
          "no single token rejects its response; see importanceSampling.rejection"),
    *rows("algorithm.filter_groups.max_inflight_gen_batches", "rounds of dynamic sampling follow each other"),
    *lost({"actor_rollout_ref.actor.shuffle": False, "critic.shuffle": False},
          "the minibatches of a step keep its order"),
    *rows("{actor_rollout_ref.actor,critic}.data_loader_seed", "it belongs to shuffle"),
    *rows("actor_rollout_ref.actor.policy_loss.{clip_cov_ratio,clip_cov_lb,clip_cov_ub,kl_cov_ratio,ppo_kl_coef,"
          "dro_beta}",
          "it belongs to losses that are not here, which loss_mode names"),
    *rows("actor_rollout_ref.actor.{calculate_entropy,calculate_sum_pi_squared}", "the entropy is among the metrics"),
    *lost({"actor_rollout_ref.{actor,ref}.qat.enable": False,
           "{actor_rollout_ref.{actor,ref}.{fsdp_config,megatron},critic.{fsdp,megatron}}.qat.enable": False},
          "training is not aware of quantization"),
    *lost({"distillation.enabled": False}, "there is no teacher"),
    # the optimizer
    *lost({"{actor_rollout_ref.actor,critic}.optim.weight_decay_incr_style": "constant"},
          "the weight decay is constant"),
    *lost({"{actor_rollout_ref.actor,critic}.optim.num_cycles": 0.5}, "the cosine is half a wave"),
    *lost({"{actor_rollout_ref.actor,critic}.optim.lr_decay_steps": None},
          "the learning rate decays over the job's steps"),
    *lost({"{actor_rollout_ref.actor,critic}.optim.decay_type": "linear"}, "see optimizer.schedule"),
    *rows("{actor_rollout_ref.actor,critic}.optim.{lr_wsd_decay_style,lr_wsd_decay_steps,lr_start,lr_decay_ratio,"
          "min_lr_factor}",
          "it belongs to schedules that are not here"),
    # the model
    *lost({"actor_rollout_ref.model.{hf_config_path,external_lib}": None}, "a model is what its folder says"),
    *lost({"actor_rollout_ref.model.{lora_adapter_path,lora.adapter_path}": None},
          "training goes on from an adapter: merge it into the model, and name that in model.source"),
    *lost({"actor_rollout_ref.model.exclude_modules": None}, "name the layers in model.lora.targetModules"),
    *lost({"actor_rollout_ref.model.mtp.{enable,enable_train,enable_rollout}": False},
          "there is no multi-token prediction"),
    *lost({"actor_rollout_ref.model.lora.type": "lora"}, "adapters are plain LoRA"),
    # the run
    *lost({"trainer.val_before_train": True}, "evaluation runs before the first step"),
    *lost({"trainer.val_only": False}, "a job trains; set steps: 1 to see its evaluation"),
    *lost({"trainer.resume_from_path": None}, "it begins from a checkpoint of verl: export it, and name it in"
          " model.source"),
    *rows("trainer.resume_mode", "a job resumes from its own checkpoints automatically"),
    *lost({"trainer.checkpoint_callback_class": None}, "there are no callbacks"),
    *lost({"trainer.v1.trainer_mode": "sync"}, "each step is learnt from its own samples; see spec.async"),
    *lost({"trainer.v1.sampler.custom_sampler.path": None}, "prompts are shuffled by the seed"),
    *rows("trainer.v1.sampler.custom_sampler.name trainer.v1.sampler.{max_off_policy_threshold,"
          "max_off_policy_strategy,"
          "sync_refill_failed_groups,sampler_kwargs} trainer.v1.sync{,.num_warmup_batches}"
          " trainer.v1.{colocate_async,separate_async}.{num_warmup_batches,parameter_sync_step}"
          " trainer.v1.separate_async.hybrid_rollout.{enable_switch,switch_threshold_ratio,adaptive_switch_threshold,"
          "switch_threshold_step_up,switch_threshold_step_down,switch_threshold_release_steps,"
          "switch_cost_window_size}",
          "it belongs to other modes than sync, which trainer_mode names"),
    *rows("trainer.{nnodes,n_gpus_per_node,n_training_gpus_per_node}",
          "numbers are of a whole step, on any number of GPUs"),
    *rows("trainer.{log_val_generations,val_generations_to_log_to_wandb,validation_data_dir,rollout_data_dir}",
          "responses are in samples.jsonl, and rollouts in the job's folder"),
    *rows("trainer.{max_critic_ckpt_to_keep,del_local_ckpt_after_load,remove_previous_ckpt_in_save,"
          "esi_redundant_time,"
          "default_hdfs_dir,default_local_dir}", "a job's folder, artifacts.uri and its name, holds its checkpoints"),
    *rows("trainer.{balance_batch,ray_wait_register_center_timeout,device,use_v1,use_legacy_worker_impl,worker_cls}"
          " actor_rollout_ref.{hybrid_engine,nccl_timeout} critic.nccl_timeout", "it is about verl's own workers"),
]  # fmt: skip

OPEN = {
    "actor_rollout_ref.rollout.engine_kwargs": "an argument of the engine: generation.vllm.extraArgs takes vLLM's",
    "actor_rollout_ref.actor.optim.override_optimizer_config": "see spec.optimizer for what there is",
    "actor_rollout_ref.model.override_config": "a model is what its config.json says: change it there",
    "custom_reward_function.reward_kwargs": "give it to the function as a default",
    "reward.custom_reward_function.reward_kwargs": "give it to the function as a default",
    "reward.reward_kwargs": "it is an argument of a reward manager, which a job does not have",
    "reward_model.reward_kwargs": "it is an argument of a reward manager, which a job does not have",
    "ray_kwargs.ray_init.runtime_env": "there is no Ray; see pods.env for variables",
    "async_training": "each step is learnt from its own samples; see spec.async",
}
"""Sections with names of the user's own choice, and why none of them is converted."""

OTHERS: dict[str, Row] = dict(_FIELDS)
"""Rows by the name of the field."""
