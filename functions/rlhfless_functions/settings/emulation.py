"""What an emulated GPU is like: an instance that has one computes nothing, and takes the time that a real one would."""

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class EmulationSettings(Settings):
    """An emulated instance. All durations are a real instance's; `time_scale` says how long they take here."""

    trace: str = Field(min_length=1)
    """URI of the trace whose lengths the responses have: a Parquet file, or a folder of them."""
    prompts_per_step: int = Field(ge=1)
    """Prompts of a training step, which tell the epoch of a step where the trace has epochs but no steps."""
    step_seconds: float = Field(ge=0)
    """Seconds of a decode step whatever its batch."""
    sequence_seconds: float = Field(ge=0)
    """Seconds that each sequence adds to a decode step."""
    context_seconds: float = Field(ge=0)
    """Seconds that each token in a sequence's context adds to a decode step."""
    prefill_token_seconds: float = Field(ge=0)
    """Seconds for each token whose keys and values are computed before a sequence decodes."""
    draft_seconds: float = Field(default=0.0, ge=0)
    """Seconds that each drafted token adds to a decode step."""
    draft_coverage: float = Field(default=0.0, ge=0, le=1)
    """Share of a sequence's decode steps for which there is something to draft."""
    draft_acceptance: float = Field(default=0.0, ge=0, le=1)
    """Chance that a drafted token is right if all before it were."""
    longest_draft: int = Field(default=16, ge=1)
    """Tokens drafted for a sequence in a step, at most."""
    kv_tokens: int = Field(ge=1)
    """Tokens that the KV cache holds."""
    max_batch: int = Field(default=256, ge=1)
    """Most sequences in a decode step."""
    prefix_cache: bool = True
    """Whether keys and values are kept from one request to the next, as with an engine that caches prefixes."""
    startup_seconds: float = Field(default=0.0, ge=0)
    """From asking for an instance to its listening."""
    weight_load_seconds: float = Field(default=0.0, ge=0)
    """Loading a weights version into a generation instance."""
    preparation_token_seconds: float = Field(default=0.0, ge=0)
    """Seconds of preparation for each token of a sample, its prompt included."""
    learning_token_seconds: float = Field(default=0.0, ge=0)
    """Seconds of learning for each token of a sample, its prompt included."""
    preparation_load_seconds: float = Field(default=0.0, ge=0)
    """Reading the models that preparation asks, before its first task and after each sleep."""
    learning_move_seconds: float = Field(default=0.0, ge=0)
    """Moving the learner's state between its GPUs and the host's memory, one way: when it falls asleep and wakes."""
    update_seconds: float = Field(default=0.0, ge=0)
    """The optimizer's step and the publication of the weights."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds here for each emulated second: 0.1 is ten times as fast as the real thing."""
