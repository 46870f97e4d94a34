"""Settings of an emulated GPU. Its instance computes nothing and takes the time that a real one would take."""

from pydantic import Field

from rlhfless_functions.settings.base import Settings


class EmulationSettings(Settings):
    """An emulated instance. All durations are those of a real instance; `time_scale` shortens them."""

    trace: str = Field(min_length=1)
    """URI of the trace with the lengths of the responses: a Parquet file, or a folder of them."""
    prompts_per_step: int = Field(ge=1)
    """Prompts of a training step. If the trace has epochs but no steps, they determine the epoch of a step."""
    acts: bool = False
    """Whether samples act in environments, which then take as many turns and as much time as in the trace."""
    step_seconds: float = Field(ge=0)
    """Seconds of a decode step that do not depend on its batch."""
    sequence_seconds: float = Field(ge=0)
    """Seconds that each sequence adds to a decode step."""
    context_seconds: float = Field(ge=0)
    """Seconds that each token in a sequence's context adds to a decode step."""
    prefill_token_seconds: float = Field(ge=0)
    """Seconds for each token whose keys and values are computed before a sequence decodes."""
    draft_seconds: float = Field(default=0.0, ge=0)
    """Seconds that each drafted token adds to a decode step."""
    draft_coverage: float = Field(default=0.0, ge=0, le=1)
    """Share of a sequence's decode steps that have something to draft."""
    draft_acceptance: float = Field(default=0.0, ge=0, le=1)
    """Probability that a drafted token is right if all before it were."""
    longest_draft: int = Field(default=16, ge=1)
    """Most tokens drafted for a sequence in a step."""
    kv_tokens: int = Field(ge=1)
    """Capacity of the KV cache in tokens."""
    max_batch: int = Field(default=256, ge=1)
    """Most sequences in a decode step."""
    prefix_cache: bool = True
    """Whether keys and values are kept between requests, as in an engine that caches prefixes."""
    startup_seconds: float = Field(default=0.0, ge=0)
    """Seconds from requesting an instance until it listens."""
    weight_load_seconds: float = Field(default=0.0, ge=0)
    """Seconds to load a weights version into a generation instance."""
    preparation_token_seconds: float = Field(default=0.0, ge=0)
    """Seconds of preparation for each token of a sample, its prompt included."""
    learning_token_seconds: float = Field(default=0.0, ge=0)
    """Seconds of learning for each token of a sample, its prompt included."""
    preparation_load_seconds: float = Field(default=0.0, ge=0)
    """Seconds to read the models of preparation, before its first task and after each sleep."""
    learning_move_seconds: float = Field(default=0.0, ge=0)
    """Seconds to move the learner's state between its GPUs and the host's memory, one way: to sleep or to wake."""
    learning_load_seconds: float = Field(default=0.0, ge=0)
    """Seconds to load the model into a fresh learner that starts from no checkpoint."""
    learning_store_seconds: float = Field(default=0.0, ge=0)
    """Seconds to write the learner's state to the store as a checkpoint, or to read it from there."""
    update_seconds: float = Field(default=0.0, ge=0)
    """Seconds for the optimizer's step and for publishing the weights."""
    time_scale: float = Field(default=1.0, gt=0)
    """Real seconds for each emulated second: 0.1 is ten times as fast as real GPUs."""
