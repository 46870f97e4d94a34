"""The outputs of a job: checkpoints, artifacts and metrics."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.settings import Settings


class CheckpointsSpec(Settings):
    """Checkpoints of everything that training resumes from: weights, critic, optimizer state, position in the data."""

    every_steps: int = Field(default=10, ge=1)
    """Steps between checkpoints. The batches since are kept; after a loss they are learnt from again."""
    keep: int = Field(default=2, ge=1)
    """Number of the newest checkpoints to keep, with the batches since the oldest of them: if the newest is damaged, an
    older one serves."""
    best: bool = False
    """Also keep the weights with the best evaluation."""
    keep_rollouts: bool = False
    """Keep the tokens, log-probabilities and advantages of every step's batch, for `rlhfless replay`. Otherwise only
    the batches since the oldest kept checkpoint are kept."""


class ArtifactsSpec(Settings):
    """Place of the job's outputs."""

    uri: str = Field(default="runs", min_length=1)
    """Folder or fsspec URI. The job writes into a subfolder with its name. A relative path is relative to the working
    directory of `rlhfless run`, or on a cluster to the namespace's folder in the operator's store. A cluster refuses
    other places, unless its administrator lists them."""


class WandbSpec(Settings):
    """Weights & Biases."""

    project: str = Field(min_length=1)
    """Project of the run."""
    mode: Literal["online", "offline"] = "online"
    """Send metrics during training, or write files for `wandb sync`."""


class MlflowSpec(Settings):
    """MLflow."""

    tracking_uri: str = Field(min_length=1)
    """Address of the tracking server, or a database such as `sqlite:///mlflow.db`."""
    experiment: str = Field(min_length=1)
    """Experiment of the run."""


class TrackingSpec(Settings):
    """Destinations of metrics, besides `metrics.jsonl`, which is always written."""

    tensorboard: bool = False
    """Write TensorBoard event files beside the job's artifacts."""
    wandb: WandbSpec | None = None
    """Log to Weights & Biases."""
    mlflow: MlflowSpec | None = None
    """Log to MLflow."""
    sample_groups: int = Field(default=1, ge=0, le=16)
    """Groups of each training step whose first 8 responses are kept as text, with their rewards, in `samples.jsonl` and
    the report; 0 keeps none. If the file would exceed 4 MiB, every second step is omitted."""
