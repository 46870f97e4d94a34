"""How the learner spends memory."""

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class LearningSettings(Settings):
    """How the learner spends memory and time; none of it changes what is learnt."""

    processes: int | None = Field(default=None, ge=1, le=64)
    """Processes of the instance that share weights, gradients and optimizer state (FSDP2); one per GPU if left out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    autocast: bool = True
    """Compute in bfloat16 where the hardware has it; weights, log-softmax and optimizer stay in float32."""
    share_prompts: bool = True
    """Compute a group's prompt once for all of its samples that are passed together, in preparation as well; the
    update is the same up to rounding."""
    logits_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose float32 logits over the whole vocabulary are held at once; from its size if left out."""
