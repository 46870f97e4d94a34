"""The optimizer, its schedule and the batch that it steps on."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhfless_functions.settings.base import Settings


class OptimizerSettings(Settings):
    """The policy's optimizer and learning-rate schedule."""

    name: Literal["adamw", "muon"] = "adamw"
    """`adamw`, or `muon` for matrices with AdamW for everything else."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of AdamW's first moment; Muon's momentum."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of AdamW's second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay; norms, biases and embeddings are left out of it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, over the job's steps."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps over which the learning rate rises linearly from zero."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate that a linear or cosine schedule ends at."""
    offload: bool = False
    """Keep the optimizer's state and a copy of the weights in the host's memory and take the steps there, for an
    accelerator that has no room for them."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm."""


class BatchSettings(Settings):
    """How many samples a step has and how they are cut up for learning."""

    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts drawn for each training step (train_batch_size, rollout_batch_size)."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Responses sampled for each prompt: the size of a group (rollout.n, num_generations, n_samples_per_prompt)."""
    minibatch_samples: int | None = Field(default=None, ge=1)
    """Samples per optimizer update (ppo_mini_batch_size × n); all of the step's if left out."""
    microbatch_tokens: int = Field(default=16384, ge=1)
    """Tokens, padding included, of one forward and backward pass; a longer sample is passed alone."""

    @model_validator(mode="after")
    def _minibatch_divides(self) -> Self:
        samples = self.prompts_per_step * self.samples_per_prompt
        if self.minibatch_samples is not None and samples % self.minibatch_samples:
            raise ValueError(
                f"minibatchSamples: {self.minibatch_samples} does not divide the step's {samples} samples"
                f" (promptsPerStep {self.prompts_per_step} × samplesPerPrompt {self.samples_per_prompt})"
            )
        return self
