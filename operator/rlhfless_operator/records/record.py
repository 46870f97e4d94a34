"""The lines of `metrics.jsonl`, `ledger.jsonl` and `samples.jsonl`, for people and scripts."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rlhfless_functions import artifacts

ChargedState = Literal["starting", "busy", "idle", "switching", "draining"]
"""States in which an instance has its GPUs."""
KeptState = Literal[ChargedState, "asleep"]
"""States of an existing instance."""
CHARGED_STATES: tuple[ChargedState, ...] = get_args(ChargedState)
KEPT_STATES: tuple[KeptState, ...] = (*CHARGED_STATES, "asleep")


class Record(BaseModel):
    """The base of the lines."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class StageAccount(Record):
    """The account of one stage's instances in a step."""

    starting: float = 0.0
    """Instance-seconds from the request until ready."""
    busy: float = 0.0
    """Instance-seconds of work."""
    idle: float = 0.0
    """Instance-seconds of idle instances."""
    switching: float = 0.0
    """Instance-seconds of falling asleep and waking."""
    draining: float = 0.0
    """Instance-seconds from the order to end until gone."""
    asleep: float = 0.0
    """Instance-seconds of sleeping instances, which have no GPU and cost nothing."""
    cost: Decimal = Decimal(0)
    """Cost of all instance-seconds, except for sleeping ones."""

    @property
    def seconds(self) -> float:
        """Charged instance-seconds, in all states."""
        seconds: list[float] = [getattr(self, state) for state in CHARGED_STATES]
        return sum(seconds)


def busy_shares(accounts: Sequence[Mapping[str, StageAccount]], gpus: Mapping[str, int]) -> dict[str, float]:
    """Return the share of charged seconds that is work: of each stage with any, and under `all` of all GPU-seconds.

    Args:
        accounts: of each step, by stage.
        gpus: of an instance of each stage.
    """
    charged: dict[str, float] = {}
    busy: dict[str, float] = {}
    for stages in accounts:
        for stage, account in stages.items():
            charged[stage] = charged.get(stage, 0.0) + account.seconds
            busy[stage] = busy.get(stage, 0.0) + account.busy
    shares = {stage: busy[stage] / seconds for stage, seconds in charged.items() if seconds}
    held = sum(gpus.get(stage, 1) * seconds for stage, seconds in charged.items())
    if held:
        shares["all"] = sum(gpus.get(stage, 1) * seconds for stage, seconds in busy.items()) / held
    return shares


class StepRecord(Record):
    """One finished step. Step 0 is the evaluation before the first."""

    step: int
    """Number of the step."""
    seconds: float = 0.0
    """Duration in seconds."""
    stages: dict[str, float] = {}
    """Seconds in which only this stage delayed the step: generation, preparation, learning, overhead."""
    metrics: dict[str, float] = {}
    """Means of the step by name, such as `reward` or `kl/reference`."""
    ledger: dict[str, StageAccount] = {}
    """Instance-seconds and money by stage."""
    plan: dict[str, Any] | None = None
    """The plan that generation followed."""
    evaluation: dict[str, float] | None = None
    """Results on the evaluation's prompts after this step, if there was an evaluation."""
    finished_at: float | None = None
    """Unix time of its end."""

    @field_validator("metrics", "evaluation", mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: number for name, number in value.items() if number is not None} if value else value

    @property
    def cost(self) -> Decimal:
        """Price of the step."""
        return sum((account.cost for account in self.ledger.values()), Decimal(0))

    def metric(self, name: str) -> float:
        """Return a metric; NaN if this step does not have it."""
        return self.metrics.get(name, math.nan)

    @property
    def held_out_reward(self) -> float | None:
        """Mean reward of the evaluation after this step."""
        return self.evaluation.get("reward") if self.evaluation else None


class SpanRecord(Record):
    """A period that an instance spent in one state."""

    instance: str
    """Name of the pod or local process."""
    stage: str
    """Its function."""
    state: KeptState
    """State of the instance."""
    start: float
    """Seconds since the run began."""
    end: float
    """Seconds since the run began."""


class SampleRecord(Record):
    """A response as text: of an evaluation's prompt, or of a training step."""

    when: Literal["before", "training", "after"]
    """Origin: the evaluation before the first step, a training step, or the evaluation after the last."""
    step: int = 0
    """The training step, or the step before the evaluation."""
    row: int = 0
    """Row of the prompt in the dataset as read."""
    index: int = 0
    """Number of the sample in its group."""
    prompt: str
    """The prompt's text."""
    response: str
    """The response's text; a very long one is shortened in the middle."""
    messages: list[dict[str, str]] = []
    """The response of an episode as messages with `role` and `content`; empty without an environment."""
    reward: float | None = None
    """Its reward; None if it could not be scored."""
    terms: dict[str, float | None] = {}
    """Each reward's value, before weighting."""
    advantage: float | None = None
    """Mean over its tokens, before whitening over the batch; None in an evaluation."""
    tokens: int = Field(default=0, ge=0)
    """Tokens of the response."""
    finish_reason: str = ""
    """Reason for its end."""
    version: int = 0
    """Weights version that sampled it, named by its step."""


MOST_LINES = 64 * 2**20
"""Most bytes of a file of records."""

RecordType = TypeVar("RecordType", bound=Record)


def read_records(uri: str, kind: type[RecordType]) -> list[RecordType]:
    """Return all records of a JSONL file; none if there is no such file.

    An incomplete last line is dropped: its writer was killed while writing.

    Raises:
        ValueError: another line is not such a record; the message names the file and the line.
    """
    if not artifacts.exists(uri):
        return []
    lines = artifacts.read_bytes(uri, most=MOST_LINES).splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            if b'"checksum": "xxh3-128:' in line and not artifacts.is_sound(line):
                raise ValueError("its checksum is another: some of it has changed since it was written")
            records.append(kind.model_validate_json(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"}"):
                break
            raise ValueError(
                f"{uri}, line {number}: {_fault(error)}; restore the file from a copy, or remove it"
            ) from error
    return records


def _fault(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"]) or "the line"
    return f"{where}: {fault['msg']}"
