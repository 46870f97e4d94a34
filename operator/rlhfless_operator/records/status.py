"""The job's status: a file beside the artifacts on a laptop, the custom resource's status on a cluster."""

from decimal import Decimal
from typing import Literal

from pydantic import Field

from rlhfless_functions.api import Stage, WeightsReference
from rlhfless_functions.settings import Money, Settings

Phase = Literal["Pending", "Running", "Suspended", "Succeeded", "Failed", "Interrupted"]
RECENT_STEPS = 20


class CheckpointStatus(Settings):
    """The checkpoint that a new learner starts from."""

    step: int
    """Step after which it was written."""
    uri: str
    """Its folder."""


class LearnersStatus(Settings):
    """Number of instances that learn together in the plan."""

    step: int
    """Step of the last decision."""
    instances: int
    """How many."""
    reason: str
    """Why so many."""


class StepStatus(Settings):
    """One finished step, in brief."""

    step: int
    """Number of the step, from 1."""
    reward: float | None = None
    """Mean reward."""
    seconds: float
    """Duration in seconds."""
    actors: int
    """Generation actors of its plan."""
    cost: Money
    """Cost of its instances."""


class DataStatus(Settings):
    """Counts of a dataset's rows."""

    rows: int
    """Rows of the dataset."""
    prompts: int
    """Usable prompts."""
    too_long: int = 0
    """Rows dropped because they are longer than `sampling.maxPromptTokens`."""
    empty: int = 0
    """Rows dropped because they are empty."""
    answered: int = 0
    """Rows dropped because their last message is the assistant's."""
    without_ground_truth: int = 0
    """Prompts without ground truth, if others have one."""

    @property
    def left_out(self) -> dict[str, int]:
        """Number of dropped rows for each reason."""
        reasons = {"too_long": self.too_long, "empty": self.empty, "answered": self.answered}
        return {name: count for name, count in reasons.items() if count}


class RLHFJobStatus(Settings):
    """The progress of a job. A restarted driver continues from this and the artifact store."""

    phase: Phase = "Pending"
    """For display: Pending, Running, Suspended, Succeeded, Failed or Interrupted."""
    uid: str = ""
    """Unique id of this incarnation of the job; starting over makes a new one."""
    stage: Literal[Stage, "evaluation", "export"] | None = None
    """Current activity of the job."""
    step: int = 0
    """Finished steps."""
    steps: int = 0
    """Steps of the whole job."""
    prompts: int = 0
    """Usable prompts of the training data."""
    data: DataStatus | None = None
    """Counts of the training data's rows."""
    evaluation_data: DataStatus | None = None
    """Counts of the evaluation data's rows."""
    weights: WeightsReference | None = None
    """The newest weights."""
    critic: WeightsReference | None = None
    """The newest critic."""
    checkpoint: CheckpointStatus | None = None
    """The newest checkpoint; the batches of the steps since are kept."""
    best: WeightsReference | None = None
    """The weights with the best evaluation."""
    best_evaluation: float | None = None
    """The best evaluation's mean reward."""
    learners: LearnersStatus | None = None
    """Number chosen from `learning.instances`; none before the first choice."""
    reward: float | None = None
    """Mean reward of the last step."""
    actors: int = 0
    """Generation actors of the last step."""
    holding: str = ""
    """Why the instances of all stages stayed for the whole of the last step; empty if they were let go."""
    seconds: float = 0.0
    """Time spent on finished steps and evaluations, over all drivers."""
    instance_seconds: float = 0.0
    """Instance-seconds, over all drivers."""
    idle_seconds: float = 0.0
    """Idle instance-seconds, over all drivers."""
    gpu_seconds: float = 0.0
    """GPU-seconds, over all drivers."""
    cost: Money = Decimal(0)
    """Cost of the instances, over all drivers."""
    unfinished: dict[str, dict[str, float]] = Field(default={})
    """Instance-seconds by stage and state of drivers that have stopped since the last finished step. The next step's
    record includes them."""
    forecast: Money | None = None
    """Forecast of the job's total cost, if the remaining steps cost as much as the last ones; none before the second
    step is finished."""
    budget_used: float | None = None
    """Share of `spec.budget` that is spent, the larger one of money and GPU-hours; none without a budget."""
    message: str = ""
    """Why the job is in its phase, if there is a reason."""
    recent_steps: list[StepStatus] = Field(default=[], max_length=RECENT_STEPS)
    """The last steps."""
