"""A rehearsal: the whole training loop, with real processes and streams, on emulated GPUs."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from rlhfless_functions.settings import DurationOrZero, Settings
from rlhfless_operator.job.paths import resolve_file, resolve_model


class RehearsalSpec(Settings):
    """Emulated GPUs. Instances compute nothing and take the time that real ones would take. Prompts and lengths come
    from a trace instead of `data`. Everything else is real: planning, requests, streams, moves, the ledger, the report.
    A rehearsal does not train: it has no rewards, and its weights are names only."""

    trace: str = Field(min_length=1)
    """Lengths of the responses: a Parquet file, a folder of them, or the folder of an earlier run."""
    gpu: Literal["A100", "H100", "H200", "L40S"]
    """GPU to emulate. Uses measured latencies if there are any; otherwise computes them from the GPU's data sheet."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of an instance, with tensor parallelism. If `learning.processes` is set, a learner has that many GPUs
    instead and is that many times as fast as one."""
    model: str | None = None
    """Folder of the model whose speed is emulated, or a known name such as `Qwen2.5-7B`; by default `model.source`."""
    max_batch: int = Field(default=256, ge=1)
    """Most sequences in a decode step."""
    prefix_cache: bool = True
    """Whether an instance keeps keys and values between requests."""
    startup: DurationOrZero = 30.0
    """Time from requesting an instance until it listens: 0.1 to 6 s from sleep, 30 to 135 s from nothing."""
    weight_load: DurationOrZero | None = None
    """Time to load a weights version; by default its size at 4 GB/s per GPU."""
    update: DurationOrZero = 0.5
    """Time for the optimizer's step and for publishing the weights."""
    draft_acceptance: float | None = Field(default=None, ge=0, le=1)
    """Probability that a drafted token is right if all before it were. Used with `generation.drafting: auto` from the
    second step on. If omitted, the value that the trace's run measured; if that run did not draft, nothing is
    drafted."""
    draft_coverage: float = Field(default=1.0, ge=0, le=1)
    """Share of a sequence's decode passes that have something to draft, if `draftAcceptance` is set."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds of the rehearsal for each second of a real run: 0.1 is ten times as fast. The run's seconds and money
    shrink by the same factor, and this machine's own overhead weighs more."""

    def resolve_paths(self, base: Path) -> Self:
        """Return a copy whose relative local paths are absolute, resolved against `base`."""
        model = self.model and resolve_model(self.model, base)
        return self.model_copy(update={"trace": resolve_file(self.trace, base), "model": model})
