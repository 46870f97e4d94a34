"""The learner's memory settings."""

from typing import Annotated, Literal

from pydantic import Field

from rlhfless_functions.settings.base import EXPERIMENTAL, Settings


class LearningSettings(Settings):
    """The learner's trade of memory for time. None of these settings changes what is learnt."""

    processes: int | None = Field(default=None, ge=1, le=64)
    """Processes of the instance that share weights, gradients and optimizer state (FSDP2); by default one per GPU.
    `rlhfless run` gives the learner this many GPUs, by default one."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of keeping them."""
    autocast: bool | None = None
    """Compute in bfloat16 if the hardware supports it, on a CPU only in models at least 256 wide; weights, log-softmax
    and optimizer stay in float32. By default models with `dtype: bfloat16` do, and float32 models do not."""
    share_prompts: bool = True
    """Compute a group's prompt once for all of its samples in a micro-batch. Applies to preparation too. The update is
    the same up to rounding."""
    pack: Literal["auto", "always", "never"] = "auto"
    """Pack samples into one row without padding; each attends only to itself. Applies to preparation too. The update is
    the same up to rounding. `auto` packs on GPUs with a flash attention kernel for it (torch's own, or flash-attn's).
    On a CPU packing helps some batches only: an update took 0.8 to 1.2 times as long, longest with long responses."""
    compile: Annotated[bool, EXPERIMENTAL] = False
    """Compile the layers of policy and critic with `torch.compile`, if one process learns. The update is the same up to
    rounding. With `pack: auto`, compiled layers pack samples if the model supports it, and share prompts only in packed
    rows. It needs a C++ compiler, on GPUs a C compiler. On a CPU an update took 0.92 to 0.97 of the time of packed
    samples; with gradient checkpointing it took no less than without compiling. The first update took up to a minute
    longer. It is experimental: nothing has been measured on GPUs."""
    weight_deltas: Annotated[Literal["never", "auto"], EXPERIMENTAL] = "never"
    """Publish beside each version what changed since the previous one, for instances that have that one. `auto` does so
    if artifacts are in an object store; docs/weights.md says what that saves. It is experimental: what it saves in
    seconds has not been measured on a real link."""
    logits_chunk_tokens: int | None = Field(default=None, ge=1)
    """Tokens whose float32 logits over the whole vocabulary are held at once; by default derived from the vocabulary's
    size."""
