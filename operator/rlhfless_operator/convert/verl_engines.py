"""verl's fields of its engines, its profilers and its cluster, each by its name: none of them changes what is learnt.

Names may have braces as in a shell.
"""

from rlhfless_operator.convert.conversion import Row
from rlhfless_operator.convert.verl_others import lost, rows

_SHARED = "GPUs that share a model are learning.processes, and offloading is optimizer.offload"
_SPEED = "it concerns speed or memory alone: see spec.learning"
_STARTED = "engines are started by the job: see spec.generation"
_PROFILING = "it concerns profiling"
_MODELS = "{actor_rollout_ref.{actor,ref},critic}"
_FSDP = "{actor_rollout_ref.actor.fsdp_config,actor_rollout_ref.ref.fsdp_config,critic.fsdp,critic.model.fsdp_config}"
_ENGINES = f"{{{_FSDP},{_MODELS}.{{megatron,veomni,torchtitan}}}}"
_ROLLOUT = "actor_rollout_ref.rollout"
_PROFILERS = f"{{{_MODELS},{_ROLLOUT},reward_model}}.profiler"

_FIELDS = [
    # FSDP, Megatron, VeOmni, torchtitan
    *rows(f"{_ENGINES}.{{param_offload,optimizer_offload,grad_offload,offload_policy,reshard_after_forward,fsdp_size,"
          "forward_prefetch,use_orig_params,ulysses_sequence_parallel_size,ulysses_parallel_size,"
          "expert_parallel_size,strategy,"
          "wrap_policy.min_num_params,wrap_policy.transformer_layer_cls_to_wrap,"
          "use_no_sync_for_gradient_accumulation,"
          "enable_fsdp_offload,enable_full_shard,init_device,data_parallel_size,data_parallel_replicate_size,"
          "data_parallel_shard_size,tensor_parallel_size,pipeline_parallel_size,context_parallel_size,"
          "spmd_backend}", _SHARED),
    *rows(f"{_ENGINES}.{{seed,full_determinism}}", "one seed is for everything, and a run is repeatable"),
    *rows(f"{_ENGINES}.{{entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,use_torch_compile,"
          f"entropy_checkpointing,"
          "pad_to_length,pad_to_length_bucket,use_remove_padding,forward_only,activation_checkpoint,max_seq_len,"
          "attn_type}", _SPEED),
    *rows(f"{_FSDP}.turbo_config.distributed.{{fully_shard_parallel_size,tensor_parallel_size,expert_parallel_size,"
          "expert_fully_shard_parallel_size,ulysses_parallel_size,fsdp_plan.param_dtype,fsdp_plan.reduce_dtype,"
          "fsdp_plan.output_dtype,fsdp_plan.fsdp_implementation,fsdp_plan.num_to_forward_prefetch,"
          "fsdp_plan.num_to_backward_prefetch}", _SHARED),
    *rows(f"{_MODELS}.megatron.{{tensor_model_parallel_size,expert_model_parallel_size,expert_tensor_parallel_size,"
          "pipeline_model_parallel_size,virtual_pipeline_model_parallel_size,sequence_parallel,"
          "use_distributed_optimizer,"
          "dynamic_context_parallel,max_seqlen_per_dp_cp_rank,use_megatron_fsdp,override_ddp_config,use_mbridge,"
          "vanilla_mbridge,"
          "pad_bshd_to_minibatch_max}", _SHARED),
    *rows(f"{_MODELS}.megatron.{{use_dist_checkpointing,dist_checkpointing_path,dist_checkpointing_prefix,"
          "dist_ckpt_optim_fully_reshardable,distrib_optim_fully_reshardable_mem_efficient}",
          "models are Hugging Face folders"),
    *rows(f"{_MODELS}.megatron.override_transformer_config{{,.recompute_granularity,.recompute_modules,"
          f".recompute_method,"
          ".recompute_num_layers,.attention_backend,.apply_rope_fusion,.moe_permute_fusion,"
          ".gradient_accumulation_fusion,"
          ".moe_token_dispatcher_type,.moe_enable_deepep,.moe_router_dtype,.account_for_embedding_in_pipeline_split,"
          ".account_for_loss_in_pipeline_split,.num_layers_in_last_pipeline_stage,"
          ".num_layers_in_first_pipeline_stage,"
          ".bias_activation_fusion,.masked_softmax_fusion,.bias_dropout_fusion,.cross_entropy_loss_fusion,"
          ".deallocate_pipeline_outputs,.persist_layer_norm,.moe_grouped_gemm,.use_flash_attn,"
          ".moe_shared_expert_overlap}", _SPEED),
    *lost({f"{_MODELS}.megatron.override_transformer_config.{{moe_aux_loss_coeff,moe_z_loss_coeff}}": 0},
          "the routers of experts get no loss of their own"),
    *rows(f"{_MODELS}.megatron.override_mcore_model_config", "a model is what its config.json says"),
    *rows(f"{_MODELS}{{.megatron,}}.router_replay.{{record_file,replay_file}}", "it belongs to router_replay.mode"),
    *rows(f"{_MODELS}.veomni.{{ckpt_manager,load_checkpoint_path,enable_reentrant,attn_implementation,"
          f"moe_implementation,"
          "cross_entropy_loss_implementation,rms_norm_implementation,swiglu_mlp_implementation,"
          "rotary_pos_emb_implementation,"
          "rms_norm_gated_implementation,causal_conv1d_implementation,chunk_gated_delta_rule_implementation,"
          "load_balancing_loss_implementation,dsa_indexer_implementation,dsa_attention_implementation,"
          "mhc_implementation,"
          "qat_implementation,force_use_huggingface,enable_async_activation_offload,activation_offload_modules,"
          "activation_offload_host_cache_limit_gb,basic_modules}", _SPEED),
    *rows(f"{{actor_rollout_ref.{{actor,ref}},{_FSDP},{_MODELS}.megatron}}.qat.{{mode,group_size,ignore_patterns,"
          "activation_observer,quantization_config_path}", "it belongs to qat.enable"),
    # the number format of the learner; that of the actor's is learning.autocast
    *lost({f"{_FSDP}.model_dtype": "fp32"}, "the learner keeps float32 weights"),
    *rows("{{actor_rollout_ref.ref,critic}.{fsdp_config,megatron,torchtitan},critic.fsdp,"
          "actor_rollout_ref.actor.{megatron,torchtitan}}"
          f".dtype {_MODELS}.{{veomni,torchtitan}}.mixed_precision{{,.param_dtype,.reduce_dtype,.buffer_dtype}}"
          f" {_FSDP}.mixed_precision{{,.param_dtype,.reduce_dtype,.buffer_dtype}}",
          "numbers are bfloat16 by learning.autocast"),
    # actor, reference and critic
    *rows("actor_rollout_ref.{actor,ref}.{rollout_n,use_torch_compile,ulysses_sequence_parallel_size,"
          "use_prefix_grouper,"
          "entropy_from_logits_with_chunking,entropy_from_logits_chunk_size,entropy_checkpointing,pad_to_length,"
          "use_remove_padding,use_fused_kernels,ppo_infer_micro_batch_size_per_gpu,load_weight}"
          " critic.{rollout_n,ulysses_sequence_parallel_size,use_remove_padding,load_weight}", _SPEED),
    *rows(f"{_MODELS}.strategy", _SHARED),
    *rows("actor_rollout_ref.{ref,rollout}.log_prob_{micro_batch_size,micro_batch_size_per_gpu,use_dynamic_bsz,"
          "max_token_len_per_gpu} actor_rollout_ref.actor.ppo_micro_batch_size critic.{ppo_micro_batch_size,"
          "ppo_micro_batch_size_per_gpu,use_dynamic_bsz,"
          "ppo_max_token_len_per_gpu,forward_max_token_len_per_gpu,forward_micro_batch_size,"
          "forward_micro_batch_size_per_gpu,"
          "ppo_infer_max_token_len_per_gpu}", "it concerns memory alone, which batch.microbatchTokens bounds"),
    *rows("{actor_rollout_ref.actor,critic}.checkpoint.{save_contents,load_contents,async_save,strict,"
          "mbridge_config,contents}",
          "a checkpoint has all that training resumes from"),
    # optimizers
    *rows("{actor_rollout_ref.actor,critic}.optim.{optimizer_impl,zero_indexed_step,lr_warmup_init,"
          "use_checkpoint_opt_param_scheduler,"
          "use_precision_aware_optimizer,main_grads_dtype,exp_avg_dtype,exp_avg_sq_dtype,"
          "use_layer_wise_distributed_optimizer,"
          "override_optimizer_config,total_training_steps,override_optimizer_config.optimizer_offload_fraction,"
          "override_optimizer_config.overlap_cpu_optimizer_d2h_h2d,"
          "override_optimizer_config.use_precision_aware_optimizer,"
          "override_optimizer_config.optimizer_cpu_offload}", "the optimizer's state is float32, and its steps"
          " are the job's"),
    *rows("{actor_rollout_ref.actor,critic}.optim.{muon_momentum,muon_nesterov,muon_split_qkv,muon_scale_mode,"
          "muon_coefficient_type,"
          "muon_num_ns_steps,muon_tp_mode,muon_fp32_matmul_prec,muon_extra_scale_factor,muon_scalar_optimizer,"
          "muon_match_adamw_update_rms}", "it belongs to muon, which is not converted"),
    *rows("actor_rollout_ref.ref.optim.{name,lr,lr_warmup_steps_ratio,total_training_steps,weight_decay,"
          "lr_warmup_steps,betas,"
          "clip_grad,eps,decay_type,min_lr_factor}", "the reference policy does not learn"),
    # generation
    *rows(f"{_ROLLOUT}.{{mode,nnodes,n_gpus_per_node,full_determinism,seed,prompt_length,response_length,"
          f"gpu_memory_utilization,"
          "enforce_eager,cudagraph_capture_sizes,free_cache_engine,data_parallel_size,expert_parallel_size,"
          "pipeline_model_parallel_size,max_num_batched_tokens,max_model_len,max_num_seqs,enable_chunked_prefill,"
          "enable_prefix_caching,scheduling_policy,load_format,layered_summon,disable_log_stats,multi_stage_wake_up,"
          "router_config_path,calculate_log_probs,skip_tokenizer_init,moe_load_balance_metrics_interval,mtp,qat,"
          "use_fire_sampling,limit_images,sglang_log_level,update_weights_bucket_megabytes,enable_sleep_mode,"
          "engine_kwargs,engine_kwargs.vllm,engine_kwargs.sglang,engine_kwargs.trtllm}", _STARTED),
    *rows(f"{_ROLLOUT}.{{checkpoint_engine.{{backend,update_weights_bucket_megabytes,engine_kwargs,"
          f"custom_backend_module}},"
          "trace.{project_name,experiment_name,backend,token2text,max_samples_per_step_per_worker},"
          "prometheus.{enable,port,file,served_model_name},disaggregation.{enabled,prefill_replicas,decode_replicas,"
          "decode_tensor_model_parallel_size,transfer_backend,bootstrap_port,ib_device}}", _STARTED),
    # models
    *rows("{actor_rollout_ref.model,critic.model}.{use_shm,enable_activation_offload,use_remove_padding,use_liger,"
          "use_fused_kernels,fused_kernel_options.impl_backend,tiled_mlp.enabled,tiled_mlp.num_shards,"
          "override_config,"
          "override_config.attn_implementation}", _SPEED),
    *rows("{actor_rollout_ref.model,critic.model}.mtp.{detach_encoder,mtp_loss_scaling_factor,speculative_algorithm,"
          "speculative_num_steps,speculative_eagle_topk,speculative_num_draft_tokens,method,num_speculative_tokens}",
          "it belongs to mtp.enable"),
    *rows("{actor_rollout_ref.model,critic.model}.lora.{merge,a2a_experimental,dtype,freeze_vision_model,"
          "freeze_vision_projection,freeze_language_model,lora_A_init_method,lora_B_init_method,dropout_position,"
          "exclude_modules}",
          "adapters are peft's plain LoRA, and vLLM gets them as they are"),
    # the critic is a copy of the policy
    *rows("critic.model.{enable_gradient_checkpointing,mtp.enable,mtp.enable_train,mtp.enable_rollout,"
          "hf_config_path,external_lib,"
          "custom_chat_template,lora.type,lora.rank,lora.alpha,lora.dropout,lora.target_modules,"
          "lora.adapter_path,lora_alpha,"
          "target_modules,exclude_modules,lora_adapter_path,tokenizer_path} critic.enable",
          "the critic is a copy of the policy, and learns with its adapters, checkpointing and schedule"),
    # reward models and teachers
    *rows("{reward.reward_model,reward_model}.rollout.{name,dtype,gpu_memory_utilization,enforce_eager,"
          "cudagraph_capture_sizes,"
          "free_cache_engine,data_parallel_size,expert_parallel_size,tensor_model_parallel_size,"
          "pipeline_model_parallel_size,"
          "max_num_batched_tokens,max_model_len,max_num_seqs,load_format,layered_summon,scheduling_policy,"
          "full_determinism,seed,"
          "multi_stage_wake_up,engine_kwargs,limit_images,enable_chunked_prefill,enable_prefix_caching,"
          "disable_log_stats,"
          "skip_tokenizer_init,ignore_eos,temperature,top_k,top_p,do_sample,n,prompt_length,response_length,"
          "quantization,"
          "quantization_config_file,mtp,disaggregation.enabled,disaggregation.prefill_replicas,"
          "disaggregation.decode_replicas,"
          "disaggregation.decode_tensor_model_parallel_size,disaggregation.transfer_backend,"
          "disaggregation.bootstrap_port,"
          "disaggregation.ib_device}", "reward models are loaded by the preparation function, which computes one"
          " number"),
    *rows("distillation.{n_gpus_per_node,nnodes,teacher_key} distillation.distillation_loss.{loss_mode,topk,"
          "use_task_rewards,"
          "distillation_loss_coef,loss_max_clamp,log_prob_min_clamp,use_policy_gradient,policy_loss_mode,clip_ratio,"
          "clip_ratio_low,clip_ratio_high} distillation.teacher_models.teacher_model.{key,model_path,num_replicas}"
          " distillation.teacher_models.teacher_model.inference.{name,dtype,gpu_memory_utilization,enforce_eager,"
          "cudagraph_capture_sizes,free_cache_engine,data_parallel_size,expert_parallel_size,"
          "tensor_model_parallel_size,"
          "max_num_batched_tokens,max_model_len,max_num_seqs,load_format,engine_kwargs,limit_images,"
          "enable_chunked_prefill,"
          "enable_prefix_caching,disable_log_stats,skip_tokenizer_init,prompt_length,response_length,temperature}",
          "it belongs to distillation.enabled"),
    # profiling
    *rows(f"{_PROFILERS}.{{tool,enable,discrete,all_ranks,ranks,save_path,relocate_results,finish_hook_cmd,"
          f"finish_hook_all_ranks,"
          "finish_hook_ranks,tool_config.nsys.discrete,tool_config.npu.contents,tool_config.npu.level,"
          "tool_config.npu.analysis,"
          "tool_config.npu.discrete,tool_config.npu.profile_token_start,tool_config.npu.profile_token_end,"
          "tool_config.torch.contents,tool_config.torch.discrete,tool_config.torch.profile_token_start,"
          "tool_config.torch.profile_token_end,tool_config.torch.schedule.skip_first,tool_config.torch.schedule.wait,"
          "tool_config.torch.schedule.warmup,tool_config.torch.schedule.active,tool_config.torch.schedule.repeat,"
          "tool_config.torch_memory.trace_alloc_max_entries,tool_config.torch_memory.stack_depth,"
          "tool_config.torch_memory.memory_snapshot_num_steps,tool_config.precision_debugger.config_path,"
          "tool_config.precision_debugger.steps,tool_config.precision_debugger.stages,"
          "tool_config.precision_debugger.strict}", _PROFILING),
    *rows("global_profiler.{tool,steps,profile_continuous_steps,save_path,relocate_results,finish_hook_cmd,"
          "finish_hook_all_ranks,"
          "finish_hook_ranks,global_tool_config.nsys.discrete,global_tool_config.nsys.{controller,"
          "worker}_nsight_options"
          ".{trace,cuda-memory-usage,cuda-graph-trace,capture-range,capture-range-end,kill},"
          "global_tool_config.torch_memory.{trace_alloc_max_entries,stack_depth,memory_snapshot_num_steps,"
          "context,stacks,kw_args},"
          "global_tool_config.precision_debugger.{config_path,steps,stages,strict}}"
          " trainer.{profile_steps,profile_continuous_steps,npu_profile}", _PROFILING),
    # its cluster
    *rows("transfer_queue.{enable,metrics.enabled,metrics.port,backend.storage_backend,"
          "backend.SimpleStorage.{total_storage_size,num_data_storage_units},backend.MooncakeStore.{auto_init,"
          "metadata_server,"
          "master_server_address,local_hostname,protocol,global_segment_size,local_buffer_size,device_name}}"
          " skip.{rollout,rollout_tq,async_rollout}.{enable,dump_dir,steps,action} model_engine"
          f" {_ROLLOUT}.{{skip_rollout,skip_dump_dir,skip_use_default_dir}}"
          " hydra.searchpath hydra.run.dir config_path config_name", "it is about verl's own workers"),
    *rows("ray_kwargs.{ray_init.num_cpus,ray_init.address,ray_init.runtime_env.py_executable,timeline_json_file}"
          " ray_init.{num_cpus,timeline_json_file}", "there is no Ray"),
]  # fmt: skip

ENGINES: dict[str, Row] = dict(_FIELDS)
"""Rows by the name of the field."""
