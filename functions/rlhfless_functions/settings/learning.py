"""How the learner spends memory."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class LearningSettings(Settings):
    """How the learner spends memory and time; none of it changes what is learnt."""

    processes: int | None = Field(default=None, ge=1, le=64)
    """Processes of the instance that share weights, gradients and optimizer state (FSDP2); one per GPU if left out.
    `rlhfless run` gives the learner as many GPUs, and one if it is left out."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    autocast: bool = True
    """Compute in bfloat16 where the hardware has it; weights, log-softmax and optimizer stay in float32."""
    share_prompts: bool = True
    """Compute a group's prompt once for all of its samples that are passed together, in preparation as well; the
    update is the same up to rounding."""
    pack: Literal["auto", "always", "never"] = "auto"
    """Pass samples in one row without padding, each attending to itself alone, in preparation as well; the update is
    the same up to rounding. `auto` does so on GPUs with a flash attention kernel for it (torch's own, or flash-attn's).
    On a CPU it pays for some batches only: an update took 0.8 to 1.2 times as long, the longest with long responses."""
    compile: bool = False
    """Compile the layers of policy and critic with `torch.compile`, where one process learns; the update is the same up
    to rounding. It packs samples where `pack` is `auto` and the model can, and shares prompts in packed rows alone. It
    needs a C++ compiler, on GPUs one for C. On a CPU an update took 0.92 to 0.97 of the time of packed samples, with
    gradient checkpointing no less than without compiling, and the first one up to a minute more."""
    weight_deltas: Literal["auto", "never"] = "auto"
    """Publish beside each version what changed since the one before, for instances that have that one. `auto` does so
    where artifacts are in an object store; docs/weights.md says what that saves."""
    logits_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose float32 logits over the whole vocabulary are held at once; from its size if left out."""
