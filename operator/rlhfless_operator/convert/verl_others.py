"""verl's fields without a field in a job: those without effect, and unsupported ones."""

from rlhfless_operator.convert.conversion import Row, without

_ROLLOUT = "actor_rollout_ref.rollout"
_WHOLE = "rlhfless samples from the full distribution, because log-probabilities refer to it"
_EVALUATION = "evaluation samples as training does"

OTHERS: dict[str, Row] = {
    f"{_ROLLOUT}.top_k": Row(-1, without(_WHOLE, -1, 0)),
    f"{_ROLLOUT}.top_p": Row(1, without(_WHOLE, 1)),
    f"{_ROLLOUT}.val_kwargs.top_k": Row(-1, without(_EVALUATION, -1, 0)),
    f"{_ROLLOUT}.val_kwargs.top_p": Row(1, without(_EVALUATION, 1)),
    f"{_ROLLOUT}.multi_turn.enable": Row(False, without("there are no turns and no tools", False)),
    f"{_ROLLOUT}.quantization": Row(None, without("see generation.vllm.quantization")),
    "algorithm.use_pf_ppo": Row(False, without("samples are not drawn again by their reward", False)),
    "data.return_multi_modal_inputs": Row(True, without("prompts are text", True)),
    "data.custom_cls.path": Row(None, without("data are files; see spec.data")),
    "data.tokenizer": Row(None, without("see model.tokenizer")),
    "data.gen_batch_size": Row(None, without("each round draws as many prompts as were lost")),
    "data.train_max_samples": Row(-1, without("take the rows into a file of their own", -1)),
    "data.val_max_samples": Row(-1, without("take the rows into a file of their own", -1)),
    "reward.reward_manager.name": Row("naive", without("rewards are terms that are summed", "naive", "dapo")),
    "reward_model.reward_manager": Row(None, without("rewards are terms that are summed", "naive", "dapo")),
    "trainer.val_before_train": Row(True, without("evaluation runs before the first step", True)),
    "actor_rollout_ref.actor.strategy": Row(None, without("weights are shared by FSDP2", "fsdp", "fsdp2")),
    "trainer.use_v1": Row(True, without("it is verl's own", True, False)),
    "trainer.v1.trainer_mode": Row("sync", without("each step is learnt from its own samples", "sync")),
}
"""Rows by the name of the field."""

_PREFIXES = {
    "actor_rollout_ref.actor.fsdp_config": "GPUs that share a model are learning.processes",
    "actor_rollout_ref.actor.megatron": "GPUs that share a model are learning.processes",
    "actor_rollout_ref.actor.checkpoint": "see spec.checkpoints",
    "actor_rollout_ref.actor.profiler": "it concerns profiling",
    "actor_rollout_ref.actor.ulysses": "GPUs that share a model are learning.processes",
    "actor_rollout_ref.actor": "it concerns speed or memory alone, or is verl's own: see spec.learning",
    "actor_rollout_ref.ref": "reference log-probabilities are the preparation function's",
    "actor_rollout_ref.model": "it concerns speed or memory alone: see spec.learning and spec.model",
    "actor_rollout_ref.hybrid_engine": "stages take turns on GPUs, or have their own",
    "actor_rollout_ref.nccl_timeout": "see spec.limits",
    _ROLLOUT: "engines are started by the job: see spec.generation",
    "critic": "the critic is a copy of the policy, and learns with its batches and schedule",
    "data.dataloader": "prompts are read once",
    "data": "all columns go to the rewards; see spec.data",
    "reward.num_workers": "rewards run in workers of their own",
    "reward.sandbox_fusion": "see the reward code",
    "reward_model": "reward models are loaded by the preparation function",
    "reward": "see spec.rewards",
    "algorithm.rollout_correction": "part of algorithm.importanceSampling",
    "trainer.nnodes": "numbers are of a whole step, on any number of GPUs",
    "trainer.n_gpus_per_node": "numbers are of a whole step, on any number of GPUs",
    "trainer.resume": "a job resumes from its checkpoints automatically",
    "trainer.default_local_dir": "see artifacts.uri",
    "trainer.log_val_generations": "responses of evaluations are in samples.jsonl and in the report",
    "trainer.rollout_data_dir": "rollouts are in the job's folder",
    "trainer": "it is verl's own",
    "ray_kwargs": "there is no Ray",
    "ray_init": "there is no Ray",
    "global_profiler": "it concerns profiling",
    "transfer_queue": "it is verl's own",
    "skip": "it is verl's own",
    "hydra": "it is verl's own",
    "defaults": "it is verl's own",
    "model_engine": "it is verl's own",
}


def reason_of_prefix(name: str) -> str | None:
    """Explain why a field has no effect on a job, by its longest known section; None if no section is known."""
    found = [prefix for prefix in _PREFIXES if name == prefix or name.startswith((f"{prefix}.", f"{prefix}_"))]
    return _PREFIXES[max(found, key=len)] if found else None
