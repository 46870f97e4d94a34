"""OpenRLHF's arguments without a field in a job, and the names that arguments had in older releases."""

from rlhfless_operator.convert.conversion import Row
from rlhfless_operator.convert.verl_others import lost, rows

_PLACED = "stages are not placed on GPUs: the planner divides the work"
_SPEED = "it concerns speed or memory alone: see spec.learning"

_FIELDS = [
    *rows("{ref,reward,actor,critic}.{num_nodes,num_gpus_per_node} train.{colocate_actor_ref,"
          "colocate_critic_reward,colocate_all}"
          " {ref,reward}.offload colocate_actor_vllm", _PLACED),
    *rows("vllm.{sync_backend,sync_with_ray,enable_prefix_caching,enforce_eager,enable_sleep,gpu_memory_utilization}"
          " rollout.{micro_batch_size,max_tokens_per_gpu,vllm_generate_batch_size}",
          "engines are started by the job: see spec.generation"),
    *rows("ds.{zero_stage,deepcompile,zpg,adam_offload,attn_implementation,experts_implementation,"
          "use_liger_kernel,grad_accum_dtype,"
          "overlap_comm,enable_sleep,tensor_parallel_size,packing_samples,ring_attn_size,ring_attn_head_stride,"
          "use_universal_ckpt}"
          " actor.gradient_checkpointing_reentrant train.{micro_batch_size,full_determinism_enable} local_rank"
          " actor_init_on_gpu perf"
          " data.{dataloader_num_workers,disable_fast_tokenizer} flash_attn", _SPEED),
    *rows("ckpt.{path,save_hf,disable_ds,max_mem,load_enable} critic.save_value_network ds.value_head_prefix",
          "a job's folder has its checkpoints and its model, and a job resumes automatically"),
    *rows("logger.logging_steps logger.wandb.{org,group}", "every step is in metrics.jsonl, on the console and"
          " in spec.tracking"),
    *rows("data.{image_key,max_images_per_prompt} actor.freeze_visual_encoder", "prompts are text"),
    *rows("algo.kl.horizon", "it belongs to algo.kl.target"),
    *rows("{actor,critic}.muon.{lr,momentum,ns_steps,nesterov,no_nesterov}",
          "it belongs to muon, which is not converted"),
    *rows("train.ema_beta", "it belongs to train.enable_ema"),
    *rows("critic.{gradient_checkpointing_enable}", _SPEED),
    *lost({"critic.optim": "adam", "critic.adam.eps": 1e-8, "critic.adam.weight_decay": 0.0,
          "critic.lr_scheduler": "cosine_with_min_lr",
           "critic.lr_warmup_ratio": 0.03, "critic.min_lr_ratio": 0.1, "critic.max_norm": 1.0,
           "critic.adam.betas": [0.9, 0.95]},
          "the critic learns with the policy's optimizer and schedule"),
    *lost({"rollout.top_p": 1.0}, "rlhfless samples from the full distribution, because log-probabilities refer"
          " to it"),
    *lost({"algo.kl.target": None}, "the coefficient stays as it is"),
    *lost({"reward.normalize_enable": False}, "rewards are as they are: there is no running mean"),
    *lost({"reward.clip_range": [-10, 10]}, "rewards are not clipped"),
    *lost({"reward.stop_properly_penalty_coef": None}, "truncated responses keep their reward; see"
          " algorithm.maskTruncated"),
    *lost({"actor.aux_loss_coef": 0}, "the routers of experts get no loss of their own"),
    *lost({"train.agent_func_path": None}, "there are no turns and no tools"),
    *lost({"train.enable_ema": False}, "there is no average of weights"),
    *lost({"ds.load_in_4bit": False}, "adapters are plain LoRA on weights that are not quantized"),
    *lost({"data.input_template": None}, "prompts are as the data has them: write the template's text into them"),
    *lost({"data.max_samples": 100_000_000}, "take the rows into a file of their own"),
    *lost({"ckpt.best_metric_key": ""}, "the best have the highest reward: see checkpoints.best"),
    *lost({"use_ms": False}, "models come from the Hugging Face hub"),
    *lost({"ptx_coef": 0.05, "pretrain_data": None}, "there is no supervised loss beside"),
]  # fmt: skip

OTHERS: dict[str, Row] = dict(_FIELDS)
"""Rows by the name of the argument."""

_OLD = (
    "pretrain actor.model_name_or_path, reward_pretrain reward.model_name_or_path, critic_pretrain"
    " critic.model_name_or_path,"
    " remote_rm_url reward.remote_url, prompt_data data.prompt_dataset, prompt_data_probs data.prompt_probs,"
    " prompt_split data.prompt_split, input_key data.input_key, label_key data.label_key, input_template"
    " data.input_template,"
    " apply_chat_template data.apply_chat_template, max_len data.max_len, prompt_max_len data.prompt_max_len,"
    " generate_max_len rollout.max_new_tokens, max_samples data.max_samples, rollout_batch_size rollout.batch_size,"
    " n_samples_per_prompt rollout.n_samples_per_prompt, micro_rollout_batch_size rollout.micro_batch_size,"
    " vllm_generate_batch_size rollout.vllm_generate_batch_size, train_batch_size train.batch_size,"
    " micro_train_batch_size train.micro_batch_size, use_dynamic_batch train.dynamic_batch_enable,"
    " train_max_tokens_per_gpu train.max_tokens_per_gpu, rollout_max_tokens_per_gpu rollout.max_tokens_per_gpu,"
    " max_epochs train.max_epochs, num_episodes train.num_episodes, seed train.seed, temperature rollout.temperature,"
    " top_p rollout.top_p, actor_learning_rate actor.adam.lr, critic_learning_rate critic.adam.lr, adam_betas"
    " actor.adam.betas,"
    " l2 actor.adam.weight_decay, lr_scheduler actor.lr_scheduler, lr_warmup_ratio actor.lr_warmup_ratio,"
    " max_norm actor.max_norm, advantage_estimator algo.advantage.estimator, no_advantage_std_norm"
    " algo.advantage.no_std_norm,"
    " gamma algo.advantage.gamma, lambd algo.advantage.lambd, eps_clip actor.eps_clip, eps_clip_low_high"
    " actor.eps_clip_low_high,"
    " dual_clip actor.dual_clip, value_clip critic.value_clip, policy_loss_type actor.policy_loss_type,"
    " entropy_loss_coef actor.entropy_coef, aux_loss_coef actor.aux_loss_coef, freezing_actor_steps"
    " critic.freezing_steps,"
    " save_value_network critic.save_value_network, init_kl_coef algo.kl.init_coef, kl_target algo.kl.target,"
    " kl_horizon algo.kl.horizon, kl_estimator algo.kl.estimator, use_kl_loss algo.kl.use_loss,"
    " dynamic_filtering algo.dynamic_filtering_enable, dynamic_filtering_reward_range algo.dynamic_filtering_range,"
    " normalize_reward reward.normalize_enable, reward_clip_range reward.clip_range, overlong_buffer_len"
    " reward.overlong_buffer_len,"
    " overlong_penalty_factor reward.overlong_penalty_factor, enable_vllm_is_correction"
    " algo.advantage.is_correction_enable,"
    " vllm_is_truncated_threshold algo.advantage.is_correction_threshold, vllm_is_correction_type"
    " algo.advantage.is_correction_type,"
    " async_train train.async_enable, async_queue_size train.async_queue_size, partial_rollout"
    " train.partial_rollout_enable,"
    " agent_func_path train.agent_func_path, enable_ema train.enable_ema, ema_beta train.ema_beta,"
    " full_determinism train.full_determinism_enable, gradient_checkpointing actor.gradient_checkpointing_enable,"
    " gradient_checkpointing_use_reentrant actor.gradient_checkpointing_reentrant, save_steps ckpt.save_steps,"
    " save_path ckpt.output_dir, ckpt_path ckpt.path, save_hf_ckpt ckpt.save_hf, disable_ds_ckpt ckpt.disable_ds,"
    " max_ckpt_num ckpt.max_num, max_ckpt_mem ckpt.max_mem, load_checkpoint ckpt.load_enable, eval_steps eval.steps,"
    " eval_dataset eval.dataset, eval_split eval.split, eval_temperature eval.temperature,"
    " eval_n_samples_per_prompt eval.n_samples_per_prompt, logging_steps logger.logging_steps, use_wandb"
    " logger.wandb.key,"
    " wandb_org logger.wandb.org, wandb_group logger.wandb.group, wandb_project logger.wandb.project,"
    " wandb_run_name logger.wandb.run_name, use_tensorboard logger.tensorboard_dir, vllm_num_engines"
    " vllm.num_engines,"
    " vllm_tensor_parallel_size vllm.tensor_parallel_size, vllm_sync_backend vllm.sync_backend,"
    " vllm_sync_with_ray vllm.sync_with_ray, enable_prefix_caching vllm.enable_prefix_caching, enforce_eager"
    " vllm.enforce_eager,"
    " vllm_enable_sleep vllm.enable_sleep, vllm_gpu_memory_utilization vllm.gpu_memory_utilization, zero_stage"
    " ds.zero_stage,"
    " deepcompile ds.deepcompile, zpg ds.zpg, adam_offload ds.adam_offload, param_dtype ds.param_dtype,"
    " attn_implementation ds.attn_implementation, use_liger_kernel ds.use_liger_kernel, grad_accum_dtype"
    " ds.grad_accum_dtype,"
    " overlap_comm ds.overlap_comm, deepspeed_enable_sleep ds.enable_sleep, ds_tensor_parallel_size"
    " ds.tensor_parallel_size,"
    " packing_samples ds.packing_samples, ring_attn_size ds.ring_attn_size, ring_head_stride"
    " ds.ring_attn_head_stride,"
    " use_ds_universal_ckpt ds.use_universal_ckpt, load_in_4bit ds.load_in_4bit, lora_rank ds.lora.rank,"
    " lora_alpha ds.lora.alpha,"
    " lora_dropout ds.lora.dropout, target_modules ds.lora.target_modules, value_head_prefix ds.value_head_prefix,"
    " disable_fast_tokenizer data.disable_fast_tokenizer, colocate_actor_ref train.colocate_actor_ref,"
    " colocate_critic_reward train.colocate_critic_reward, colocate_all_models train.colocate_all,"
    " ref_num_nodes ref.num_nodes, ref_num_gpus_per_node ref.num_gpus_per_node, reward_num_nodes reward.num_nodes,"
    " reward_num_gpus_per_node reward.num_gpus_per_node, actor_num_nodes actor.num_nodes,"
    " actor_num_gpus_per_node actor.num_gpus_per_node, critic_num_nodes critic.num_nodes,"
    " critic_num_gpus_per_node critic.num_gpus_per_node, ref_reward_offload ref.offload, bf16 ds.param_dtype"
)

OLD: dict[str, str] = dict(pair.split() for pair in _OLD.split(","))
"""The name that an argument has now, by its name in older releases."""
