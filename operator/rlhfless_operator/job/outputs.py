"""What a job leaves behind: checkpoints, artifacts and metrics."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.settings import Settings


class CheckpointsSpec(Settings):
    """Checkpoints of everything that training goes on from: weights, critic, optimizer state, position in the data."""

    every_steps: int = Field(default=10, ge=1)
    """Steps from one checkpoint to the next; the batches in between are kept, and learnt again after a loss."""
    keep: int = Field(default=2, ge=1)
    """How many of the newest checkpoints are kept."""
    best: bool = False
    """Also keep the weights with the best evaluation."""
    keep_rollouts: bool = False
    """Keep what every step learnt from, its tokens, log-probabilities and advantages, for `rlhfless replay`. Otherwise
    only the batches since the newest checkpoint are kept."""


class ArtifactsSpec(Settings):
    """Where everything that a job makes is kept."""

    uri: str = Field(default="runs", min_length=1)
    """Folder or fsspec URI; the job's own folder in it has the job's name. A relative path is taken from the
    working directory of `rlhfless run`."""


class WandbSpec(Settings):
    """Weights & Biases."""

    project: str = Field(min_length=1)
    """Project that the run belongs to."""
    mode: Literal["online", "offline"] = "online"
    """Send as training goes, or write files for `wandb sync`."""


class MlflowSpec(Settings):
    """MLflow."""

    tracking_uri: str = Field(min_length=1)
    """Address of the tracking server, or a database such as `sqlite:///mlflow.db`."""
    experiment: str = Field(min_length=1)
    """Experiment that the run belongs to."""


class TrackingSpec(Settings):
    """Where metrics go, besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files beside the job's artifacts."""
    wandb: WandbSpec | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowSpec | None = None
    """Log to MLflow."""
    sample_groups: int = Field(default=1, ge=0, le=16)
    """Groups of each training step whose responses (the first 8) are kept as text, with their rewards, in
    `samples.jsonl` and the report; 0 keeps none. Where that file would pass 4 MiB, every second step is left out."""
