"""A rehearsal: the whole loop, with real processes and streams, on GPUs that are emulated."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field

from rlhfless_functions.settings import DurationOrZero, Settings
from rlhfless_operator.job.paths import resolve_file, resolve_model


class RehearsalSpec(Settings):
    """Emulated GPUs. Instances take the time that real ones would and compute nothing; lengths come from a trace, and
    so do the prompts, instead of `data`. Everything else is real: planning, requests, streams, moves, the ledger, the
    report. For planning and rehearsal, not for training: there are no rewards, and the weights are names only."""

    trace: str = Field(min_length=1)
    """Lengths of the responses: a Parquet file, a folder of them, or the folder of an earlier run."""
    gpu: Literal["A100", "H100", "H200", "L40S"]
    """GPU to emulate: measured latencies where there are some, else computed from its data sheet."""
    gpus: int = Field(default=1, ge=1)
    """GPUs of an instance, with tensor parallelism; a learner has `learning.processes` of them where that is given, and
    is so many times as fast as one."""
    model: str | None = None
    """Folder of the model whose speed is emulated, or a name that is known, such as `Qwen2.5-7B`; `model.source` if
    left out."""
    max_batch: int = Field(default=256, ge=1)
    """Most sequences in a decode step."""
    prefix_cache: bool = True
    """Whether an instance keeps keys and values from one request to the next."""
    startup: DurationOrZero = 30.0
    """From asking for an instance to its listening: 0.1 to 6 s from sleep, 30 to 135 s from nothing."""
    weight_load: DurationOrZero | None = None
    """Loading a weights version; its bytes at 4 GB/s a GPU if left out."""
    update: DurationOrZero = 0.5
    """The optimizer's step and the publication of the weights."""
    draft_acceptance: float | None = Field(default=None, ge=0, le=1)
    """With `generation.drafting: auto`, from the second step on: the chance that a drafted token is right if all before
    it were. If left out, what the trace's run measured, where it is a run that drafted; else nothing is drafted."""
    draft_coverage: float = Field(default=1.0, ge=0, le=1)
    """Share of a sequence's decode passes for which there is something to draft, where `draftAcceptance` is given."""
    time_scale: float = Field(default=1.0, gt=0)
    """Seconds here for each second of the real thing: 0.1 is ten times as fast. Seconds and money of the run are then
    that part of the real ones, and what this machine itself takes weighs more."""

    def resolve_paths(self, base: Path) -> Self:
        """The same with relative local paths made absolute from `base`."""
        model = self.model and resolve_model(self.model, base)
        return self.model_copy(update={"trace": resolve_file(self.trace, base), "model": model})
