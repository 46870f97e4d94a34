"""The wire contract between the control plane and the functions.

One request is one HTTP POST to `/v1/run`. The answer is a stream of newline-delimited JSON events that ends with one
terminal record, `done` or `failed`; a stream that ends without one is incomplete, whatever its HTTP status says.
Everything that a fresh instance needs is in the request: an instance is a cache, never an owner. Tokens and
log-probabilities travel through the artifact store, never through this contract. No torch here.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    EngineSettings,
    LearningSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    SamplingSettings,
)

PROTOCOL = "1.0"
"""Version of this contract, MAJOR.MINOR. Fields may be added in a minor version; readers ignore unknown ones."""

Stage = Literal["generation", "preparation", "learning"]
Purpose = Literal["training", "evaluation"]
FinishReason = Literal["stop", "truncated", "cut"]
"""`stop`: EOS or a stop string. `truncated`: the longest response was reached. `cut`: moved or drained, unfinished."""


class UnsupportedProtocolError(ValueError):
    """The request or event speaks a major version of the contract that this code does not know."""


class Message(BaseModel):
    """The base of everything on the wire: frozen, strict about types, tolerant of unknown fields."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False
    )


class TaskKey(Message):
    """The idempotency key. Two requests with equal keys ask for the same work."""

    job_uid: str
    """Unique id of the job's incarnation; `--fresh` makes a new one."""
    step: int = Field(ge=0)
    """Training step that the work belongs to; 0 is before the first."""
    stage: Stage
    """The function that does it."""
    part: str
    """Which part of the stage's work: an actor's share, a chunk of groups, an evaluation."""
    attempt: int = Field(ge=0)
    """Which try of that part."""


class WeightsReference(Message):
    """An immutable set of weights, named by the step that made it."""

    version: int = Field(ge=0)
    """Step after which the weights were published; 0 is the model as given."""
    uri: str
    """Hugging Face folder of the weights, or of the backbone where there is an adapter."""
    adapter: str | None = None
    """peft folder of the adapter, where LoRA is trained."""


class SampleTask(Message):
    """One response to generate: the `index`-th of the group of `prompt`."""

    prompt: int = Field(ge=0)
    """Row of the prompt in the materialised dataset."""
    index: int = Field(ge=0)
    """Number of the sample in its group."""


class BaseRequest(Message):
    """What every request carries."""

    protocol: str = PROTOCOL
    """Version of the contract that the sender speaks."""
    key: TaskKey
    """The idempotency key."""
    result: str
    """URI of a JSON file. If it exists, the work is done and its content is the result; else it is written last."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Longest silence of the event stream."""


class MaterializeRequest(BaseRequest):
    """Preparation: read a dataset, apply the chat template, tokenize, filter, and publish the prompts."""

    task: Literal["materialize"] = "materialize"
    model: ModelSettings
    data: DataSettings
    sampling: SamplingSettings
    sink: str
    """URI of the folder to publish: `prompts.parquet` for the functions, `index.json` for the control plane."""


class SharedPrefix(Message):
    """The beginning of a prompt of the share that other actors' prompts have too."""

    prompt: int
    """Row of the prompt."""
    tokens: int = Field(ge=1)
    """How many of its first tokens."""
    source: bool
    """Whether this actor computes it and the others read what it wrote; else it reads what another one wrote."""


class SharedPrefixes(Message):
    """What one actor computes for others, and what it reads from them, where its engine can."""

    folder: str
    """URI of the folder of the step's keys and values."""
    prefixes: list[SharedPrefix] = Field(min_length=1)
    """At most one of each prompt."""
    wait_seconds: float = Field(default=30.0, ge=0)
    """Longest wait for another actor; what has not come by then is computed."""


class GenerationRequest(BaseRequest):
    """Generation: sample responses at one weights version."""

    task: Literal["generate"] = "generate"
    purpose: Purpose = "training"
    model: ModelSettings
    weights: WeightsReference
    prompts: str
    """URI of the materialised dataset."""
    samples: list[SampleTask] = Field(min_length=1)
    """The share, in the order in which it should be admitted."""
    sampling: SamplingSettings
    seed: int
    """The job's seed; each sample's generator is made from (seed, purpose, step, prompt, index)."""
    sink: str
    """URI of the folder that this attempt writes its rollout parts to."""
    resume_from: list[str] = []
    """Sinks of earlier attempts, or single parts of them: samples finished there are not generated again, partial ones
    are continued."""
    known_until: dict[str, str] = {}
    """By such a sink, the newest of its parts that the sender has heard of: it and those before it are passed over. All
    that they hold is finished, so that it is not asked for, or `resume_from` names them."""
    flush_seconds: float = Field(default=5.0, gt=0)
    """Longest time that generated tokens are kept in the instance alone."""
    progress_seconds: float = Field(default=1.0, gt=0)
    """Least time between two progress events."""
    kv_budget_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in the KV cache at a time; from the free memory if left out."""
    engine: EngineSettings = EngineSettings()
    """What generates, and its settings."""
    shared_prefixes: SharedPrefixes | None = None
    """Beginnings of prompts that are computed once for several actors."""


class PrepareRequest(BaseRequest):
    """Preparation: score complete groups and compute what the learner needs besides tokens."""

    task: Literal["prepare"] = "prepare"
    purpose: Purpose = "training"
    model: ModelSettings
    prompts: str
    """URI of the materialised dataset."""
    rollouts: list[str]
    """URIs of the rollout parts that hold the samples."""
    samples: list[SampleTask] = Field(min_length=1)
    """The samples to prepare: complete groups, each group's samples together."""
    rewards: list[RewardSettings]
    algorithm: AlgorithmSettings
    """Resolved settings."""
    sampling: SamplingSettings
    policy: WeightsReference
    """Weights that generated: old log-probabilities are computed with them, and the tokenizer is theirs."""
    old_log_probs: bool
    """Whether the learner needs log-probabilities of `policy` (it takes more than one optimizer step)."""
    reference: WeightsReference | None = None
    """Weights of the frozen reference; with an adapter being trained, the backbone alone."""
    critic: WeightsReference | None = None
    """Weights of the value model."""
    microbatch_tokens: int = Field(ge=1)
    """Tokens of one forward pass."""
    share_prompts: bool = True
    """Whether a group's prompt may be computed once for all of its samples."""
    sink: str
    """URI of the Parquet file to write."""
    trace: str | None = None
    """URI of the part of the run's trace to write: how long each response was."""
    visits: dict[int, int] = {}
    """Earlier visits of each prompt, for the trace; a prompt that is not here is on its first."""


class BatchReference(Message):
    """The prepared samples of one training step."""

    step: int = Field(ge=1)
    parts: list[str]
    """URIs of the Parquet files that preparation wrote; all of them, unless a request says that it follows the rest."""
    samples: list[SampleTask] = Field(min_length=1)
    """Every sample of the batch in canonical order, which is the order of learning."""


class LearnRequest(BaseRequest):
    """Learning: one training step, from weights `base` and `batch` to the next weights version."""

    task: Literal["learn"] = "learn"
    model: ModelSettings
    initial: WeightsReference
    """The model as given (version 0): where there is no checkpoint, replay starts from it."""
    base: WeightsReference
    """Weights that the step starts from: version step − 1."""
    batch: BatchReference
    checkpoint: str | None = None
    """URI of the newest checkpoint (weights, critic, optimizer state); None before the first."""
    checkpoint_step: int = Field(default=0, ge=0)
    """Step of that checkpoint."""
    replay: list[BatchReference] = []
    """Batches of the steps after the checkpoint and before this one, for a learner without the state in memory."""
    pieces: int = Field(default=1, ge=1)
    """Pieces of the batch, in canonical order, whose gradients are accumulated one after the other; the same for all
    steps of a job, as the last bits of the weights depend on it. More than one needs an optimizer update that is the
    whole step's, and an algorithm that asks nothing of the whole batch."""
    following: str | None = None
    """Where `batch` is still being prepared: how the URIs of the results of the chunks to come begin. Each piece is
    accumulated as soon as it has been published; needs more than one."""
    algorithm: AlgorithmSettings
    """Resolved settings."""
    optimizer: OptimizerSettings
    batch_settings: BatchSettings
    sampling: SamplingSettings
    learning: LearningSettings
    total_steps: int = Field(ge=1)
    """Steps of the whole job, for the schedule."""
    seed: int
    publish: str
    """URI of the folder for the next weights version."""
    publish_critic: str | None = None
    """URI of the folder for the critic's next version; at step 0 preparation has no critic and values are zero."""
    save_checkpoint: str | None = None
    """URI of the folder for a checkpoint of this step, where one is due."""


class ExportRequest(BaseRequest):
    """Learning: publish one weights version as a Hugging Face folder for the user."""

    task: Literal["export"] = "export"
    model: ModelSettings
    weights: WeightsReference
    destination: str
    """URI of the folder to publish."""
    model_card: str
    """Content of its README.md."""


RunRequest = Annotated[
    MaterializeRequest | GenerationRequest | PrepareRequest | LearnRequest | ExportRequest, Field(discriminator="task")
]

# --- results -----------------------------------------------------------------------------------------------------


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
    shared_prefixes: dict[str, float] = {}
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
    examples: list[ExampleSample] = []
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

# --- events ------------------------------------------------------------------------------------------------------


class ColdStart(Message):
    """Seconds that an instance spent before it could work; reported by its first request only."""

    process: float
    """From the start of the process to a listening server, imports included."""
    load: float
    """Loading the model."""


class Started(Message):
    """The instance has taken the request."""

    event: Literal["started"] = "started"
    protocol: str = PROTOCOL
    instance: str
    """Name of the pod or local process."""
    cold_start: ColdStart | None = None
    engine: str | None = None
    """What generates here and why, once that has been chosen."""


class Progress(Message):
    """How far the share is; coalesced."""

    event: Literal["progress"] = "progress"
    finished: int
    running: int
    waiting: int
    tokens: int
    """Response tokens generated by this request so far."""
    lengths: list[tuple[int, int, int]] = []
    """(prompt, index, response tokens) of the running samples."""


class FinishedSample(Message):
    """A sample that is complete and published."""

    prompt: int
    index: int
    tokens: int
    finish_reason: FinishReason


class Samples(Message):
    """Samples that have finished since the last such event; `part` holds them."""

    event: Literal["sample"] = "sample"
    samples: list[FinishedSample]
    part: str


class Partial(Message):
    """Unfinished samples whose tokens so far have been published; `part` holds them."""

    event: Literal["partial"] = "partial"
    samples: list[FinishedSample]
    part: str


class Waiting(Message):
    """Whether the task has nothing to do until somebody else publishes something; told when that changes."""

    event: Literal["waiting"] = "waiting"
    waiting: bool


class Heartbeat(Message):
    """The instance is alive and has nothing to say."""

    event: Literal["heartbeat"] = "heartbeat"


class Done(Message):
    """Terminal: the work is complete, or as complete as a drained instance could make it."""

    event: Literal["done"] = "done"
    result: dict[str, Any]
    """One of the result models, dumped."""


FailureReason = Literal[
    "bad_request", "busy", "artifact_missing", "artifact_unwritable", "model_unloadable", "out_of_memory",
    "data_invalid", "reward_failed", "non_finite_loss", "non_finite_sample", "drained", "engine_lost", "internal",
]  # fmt: skip


class Failed(Message):
    """Terminal: the work could not be done."""

    event: Literal["failed"] = "failed"
    reason: FailureReason
    message: str
    """One sentence that names what is wrong and the remedy."""
    retryable: bool
    """Whether another instance may succeed."""


Event = Annotated[
    Started | Progress | Samples | Partial | Waiting | Heartbeat | Done | Failed, Field(discriminator="event")
]

_REQUEST: TypeAdapter[RunRequest] = TypeAdapter(RunRequest)
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def check_protocol(version: object) -> None:
    """Refuse an unknown major version.

    Raises:
        UnsupportedProtocolError: naming both versions.
    """
    ours = PROTOCOL.split(".")[0]
    if not isinstance(version, str) or version.split(".")[0] != ours:
        raise UnsupportedProtocolError(
            f"protocol version {version!r} is not supported: this side speaks {PROTOCOL};"
            f" use the same release of rlhfless on both sides"
        )


def parse_request(body: bytes) -> RunRequest:
    """Read a request.

    Raises:
        UnsupportedProtocolError: for another major version.
        ValueError: for anything else that is no request; the message names the fields.
    """
    envelope = _Envelope.model_validate_json(body)
    check_protocol(envelope.protocol)
    return _REQUEST.validate_json(body)


def dump_event(event: Event) -> bytes:
    """One line of the stream."""
    return event.model_dump_json().encode() + b"\n"


def parse_event(line: bytes) -> Event:
    """Read one line of the stream.

    Raises:
        UnsupportedProtocolError: for a `started` of another major version.
        ValueError: for a line that is no event, such as a proxy's own words in a stream that it cut off.
    """
    try:
        event = _EVENT.validate_json(line)
    except ValidationError as error:
        raise ValueError(f"not an event: {line[:200]!r}") from error
    if isinstance(event, Started):
        check_protocol(event.protocol)
    return event


class _Envelope(BaseModel):
    """The part of a request that must be readable whatever its version."""

    protocol: str
