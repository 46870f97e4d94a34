"""The job's status: a file beside the artifacts on a laptop, the custom resource's status on a cluster."""

from decimal import Decimal
from typing import Literal

from pydantic import Field

from rlhfless_functions.api import Stage, WeightsReference
from rlhfless_functions.settings import Money, Settings

Phase = Literal["Pending", "Running", "Suspended", "Succeeded", "Failed", "Interrupted"]
RECENT_STEPS = 20


class CheckpointStatus(Settings):
    """The checkpoint that a fresh learner starts from."""

    step: int
    """Step after which it was written."""
    uri: str
    """Its folder."""


class LearnersStatus(Settings):
    """How many instances the plan has learn together."""

    step: int
    """Step that this was last decided for."""
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
    """How long it took."""
    actors: int
    """Generation actors of its plan."""
    cost: Money
    """What its instances cost."""


class DataStatus(Settings):
    """What became of a dataset's rows when it was read."""

    rows: int
    """Rows of the dataset."""
    prompts: int
    """Those that are prompts to draw from."""
    too_long: int = 0
    """Those that were left out, as they are longer than `sampling.maxPromptTokens`."""
    empty: int = 0
    """Those that were left out, as nothing is said in them."""
    answered: int = 0
    """Those that were left out, as their last message is the assistant's."""
    without_ground_truth: int = 0
    """Prompts without ground truth, where others have one."""

    @property
    def left_out(self) -> dict[str, int]:
        """How many rows were left out for each reason that there was."""
        reasons = {"too_long": self.too_long, "empty": self.empty, "answered": self.answered}
        return {name: count for name, count in reasons.items() if count}


class RLHFJobStatus(Settings):
    """How far a job is. Whoever restarts reads this and the artifact store, and goes on."""

    phase: Phase = "Pending"
    """For display: Pending, Running, Suspended, Succeeded, Failed or Interrupted."""
    uid: str = ""
    """Unique id of this incarnation of the job; starting over makes a new one."""
    stage: Literal[Stage, "evaluation", "export"] | None = None
    """What the job is doing."""
    step: int = 0
    """Steps that are finished."""
    steps: int = 0
    """Steps of the whole job."""
    prompts: int = 0
    """Prompts of the training data, after what is no prompt was left out."""
    data: DataStatus | None = None
    """What became of the training data's rows."""
    evaluation_data: DataStatus | None = None
    """What became of the evaluation data's rows."""
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
    """What was chosen from `learning.instances`; none where there was no choice yet."""
    reward: float | None = None
    """Mean reward of the last step."""
    actors: int = 0
    """Generation actors of the last step."""
    seconds: float = 0.0
    """Time spent on finished steps and evaluations, over all drivers."""
    instance_seconds: float = 0.0
    """Instance-seconds, over all drivers."""
    idle_seconds: float = 0.0
    """Those of them in which an instance had nothing to do."""
    gpu_seconds: float | None = None
    """GPU-seconds, over all drivers; none where no driver has counted them."""
    cost: Money = Decimal(0)
    """What the instances cost, over all drivers."""
    forecast: Money | None = None
    """What the whole job will have cost at its end, if the steps to come cost what the last ones did."""
    budget_used: float | None = None
    """Share of `spec.budget` that is spent, the larger one of money and GPU-hours; none without a budget."""
    message: str = ""
    """Why the job is in its phase, where there is something to say."""
    recent_steps: list[StepStatus] = Field(default=[], max_length=RECENT_STEPS)
    """The last steps."""

    @property
    def all_gpu_seconds(self) -> float:
        """GPU-seconds; where an earlier release counted none, an instance had one GPU."""
        return self.instance_seconds if self.gpu_seconds is None else self.gpu_seconds

    @property
    def terminal(self) -> bool:
        """Whether nothing more will happen."""
        return self.phase in ("Succeeded", "Failed")
