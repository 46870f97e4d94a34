"""What comes of a request: the content of its result file, and of the `done` event."""

from pydantic import Field

from rlhfless_functions.api.messages import FinishReason, Message, WeightsReference


class MaterializeResult(Message):
    """How many prompts there are."""

    prompts: int
    dropped: int
    """Prompts that were longer than the longest prompt."""
    uri: str


class GenerationResult(Message):
    """What became of a share."""

    finished: int
    unfinished: int
    """Samples left when the instance was drained; their partial tokens are in the parts."""
    parts: list[str]
    """URIs of all rollout parts of this attempt."""
    prompt_tokens: int
    """Prompt tokens that were computed (a group's prompt is computed once)."""
    response_tokens: int
    """Response tokens that were computed."""
    weights_seconds: float = 0.0
    """Until the engine had the weights: nothing, replacing others in place, or a start."""
    shared_prefixes: dict[str, float] = Field(default={})
    """What was sent to and fetched from other actors: `tokens_sent`, `bytes_sent`, `seconds_sent` and the same with
    `_fetched`, of all workers of the engine; empty where nothing can be."""


class GroupResult(Message):
    """What the control plane must know of a group."""

    prompt: int
    reward: float | None
    """Mean reward of the group; None if no sample could be scored."""
    spread: float
    """Standard deviation of the group's rewards; 0 teaches nothing where the baseline is the group."""


class ExampleSample(Message):
    """A scored sample as text, for people to read."""

    prompt: str
    response: str
    reward: float | None
    tokens: int
    finish_reason: FinishReason


class PrepareResult(Message):
    """A prepared chunk of groups."""

    part: str
    groups: list[GroupResult]
    examples: list[ExampleSample] = Field(default=[])
    """Of an evaluation: the first sample of each of the dataset's first prompts."""
    metrics: dict[str, float]
    """Sums and counts are marked by their names (`/sum`, `/count`); the control plane adds chunks up."""


class LearnResult(Message):
    """The next weights version."""

    weights: WeightsReference
    critic: WeightsReference | None = None
    checkpoint: str | None = None
    metrics: dict[str, float]


class ExportResult(Message):
    """The exported folder."""

    uri: str


Result = MaterializeResult | GenerationResult | PrepareResult | LearnResult | ExportResult
