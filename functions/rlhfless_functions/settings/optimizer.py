"""The optimizer, its schedule and the batch of an update."""

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
    """Decoupled weight decay; it does not apply to norms, biases, embeddings, heads and adapters on them."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, over the steps that the job is planned with."""
    warmup_steps: int = Field(default=0, ge=0)
    """Training steps over which the learning rate rises linearly from zero."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Share of the peak learning rate at the end of a linear or cosine schedule."""
    offload: bool = False
    """Keep the optimizer's state and a copy of the weights in host memory, and update them there, for an accelerator
    that is too small for them."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Largest global norm of the gradients; larger ones are scaled down to it."""


class BatchSettings(Settings):
    """The number of samples of a step, and how they are divided for learning."""

    prompts_per_step: int = Field(default=64, ge=1)
    """Prompts drawn for each training step (train_batch_size, rollout_batch_size)."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Responses sampled for each prompt: the size of a group (rollout.n, num_generations, n_samples_per_prompt)."""
    minibatch_samples: int | None = Field(default=None, ge=1)
    """Samples per optimizer update (ppo_mini_batch_size × n); by default all samples of the step."""
    microbatch_tokens: int = Field(default=16384, ge=1)
    """Most tokens, padding included, of one forward and backward pass; a longer sample gets a pass of its own."""

    @model_validator(mode="after")
    def _minibatch_divides(self) -> Self:
        samples = self.prompts_per_step * self.samples_per_prompt
        if self.minibatch_samples is not None and samples % self.minibatch_samples:
            raise ValueError(
                f"minibatchSamples: {self.minibatch_samples} does not divide the step's {samples} samples"
                f" (promptsPerStep {self.prompts_per_step} × samplesPerPrompt {self.samples_per_prompt})"
            )
        return self
