"""The requests of the control plane to functions. A request is the work of one stage, or a part of it."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, TypeAdapter, model_validator

from rlhfless_functions.api.generation import LiveBatch, NextWeights, SharedPrefixes, Shelter
from rlhfless_functions.api.messages import (
    PROTOCOL,
    Message,
    Purpose,
    SampleTask,
    TaskKey,
    WeightsReference,
    check_protocol,
)
from rlhfless_functions.api.pieces import Piece, check_numbers
from rlhfless_functions.api.prompting import Prompting
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    EngineSampling,
    EngineSettings,
    EnvironmentSettings,
    LearningSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    SamplingSettings,
)


class BaseRequest(Message):
    """The fields of every request."""

    protocol: str = PROTOCOL
    """The sender's version of the contract."""
    key: TaskKey
    """The idempotency key."""
    result: str
    """URI of a JSON file. If it exists, the work is done and its content is the result. Otherwise it is written
    last."""
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
    rewards: list[RewardSettings] = Field(default=[])
    """Rewards that will score the responses. Every row must have what they need."""
    most_dropped: float = Field(default=1.0, ge=0, le=1)
    """Largest share of the rows that may be dropped."""
    environment: EnvironmentSettings | None = None
    """Environment of the samples. Prompts show its tools. Where a class begins its episodes, they end with the last
    user message, and the rest of the template follows as given tokens."""


class GenerationRequest(BaseRequest):
    """Generation: sample responses at one weights version, or continue those that an older one began."""

    task: Literal["generate"] = "generate"
    purpose: Purpose = "training"
    model: ModelSettings
    weights: WeightsReference
    """Weights that sample every token of this request."""
    oldest_version: int | None = Field(default=None, ge=0)
    """Oldest weights whose tokens in `resume_from` are kept; newer ones up to those of `weights` count too. By default
    only tokens of `weights` are kept, and a sample with others is generated anew."""
    keep_kv_cache: bool = False
    """Whether a response that the instance's last request left unfinished goes on with the keys and values of older
    weights, if the instance still has them. By default the request's weights compute them anew."""
    weights_from: list[str] | None = None
    """Addresses of instances that fetch these weights in a chain, each from the one before it and the first from the
    store. If omitted, each fetches from the store, and none passes them on."""
    weights_line: str | None = None
    """URI of a folder in which instances that fetch these weights say where they are reached. An instance that is not
    in `weights_from` fetches from those that said so before it. If omitted, it fetches from the store."""
    next_weights: list[NextWeights] = Field(default=[])
    """Newer versions that may be published during the request, the oldest first. The instance may fetch them into its
    memory while it decodes. The samples do not depend on it."""
    prompts: str
    """URI of the materialised dataset."""
    samples: list[SampleTask] = Field(min_length=1)
    """The share, in the order in which it should be admitted."""
    sampling: EngineSampling
    seed: int
    """The job's seed. Each sample's generator is seeded with (seed, purpose, step, prompt, index)."""
    sink: str
    """URI of the folder that this attempt writes its rollout parts to."""
    resume_from: list[str] = Field(default=[])
    """Sinks of earlier attempts, or single parts of them: samples finished there are not generated again, partial ones
    are continued."""
    known_until: dict[str, str] = Field(default={})
    """For each such sink, the newest part that the sender knows. This part and earlier ones are skipped: their samples
    are finished and not requested, or `resume_from` names them."""
    flush_seconds: float = Field(default=5.0, gt=0)
    """Longest time for which generated tokens are in the instance's memory alone."""
    progress_seconds: float = Field(default=1.0, gt=0)
    """Shortest time between progress events."""
    kv_budget_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in the KV cache at a time; by default as many as the free memory holds."""
    engine: EngineSettings = EngineSettings()
    """The engine and its settings."""
    shared_prefixes: SharedPrefixes | None = None
    """Prefixes of prompts that are computed once for several actors."""
    drafts: list[str] | None = None
    """URIs of folders with responses of earlier steps to draft tokens from, the newest step's last. An empty list reads
    none; if omitted, nothing is drafted. The samples do not depend on it."""
    draft_prompts: list[int] = Field(default=[])
    """Rows of prompts whose samples may join a live batch later, to draft tokens for as well."""
    environment: EnvironmentSettings | None = None
    """Environment of the samples; by default a response is a single turn."""
    chat_template_kwargs: dict[str, Any] = Field(default={})
    """Arguments of the chat template, for the turns of an environment."""
    shelter: Shelter | None = None
    """The process that has the environments; by default they are beside the engine, and end with the request."""
    live: LiveBatch | None = None
    """The batch that further lines of the body add samples to; None if these samples are all."""


class TrainingProgress(Message):
    """The position of the training, for rewards. As in TRL, samples of a training step see the steps before it."""

    finished: int = Field(default=0, ge=0)
    """Steps that are finished."""
    total: int = Field(default=1, ge=1)
    """Steps of the whole job."""
    epoch: float = 0.0
    """Passes over the training prompts that are finished."""
    epochs: int = 1
    """Passes of the whole job, the last one perhaps a part."""


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
    progress: TrainingProgress = TrainingProgress()
    """Position of the training, which rewards may read."""
    algorithm: AlgorithmSettings
    """Resolved settings."""
    sampling: EngineSampling
    policy: WeightsReference
    """Weights that generated the samples, or began them. Their tokenizer is used."""
    old_log_probs: bool
    """Whether to compute log-probabilities of `policy`: for a KL penalty in the reward, or while the policy is frozen.
    The learner computes those of its ratios itself."""
    reference: WeightsReference | None = None
    """Weights of the frozen reference; with LoRA, the backbone without the adapter."""
    advantages: bool = True
    """Whether to estimate advantages. Otherwise the learner does, with the values of its own critic, and none is asked
    here."""
    critic: WeightsReference | None = None
    """Weights of the value model. Before the first step there is none, and values are zero."""
    microbatch_tokens: int = Field(ge=1)
    """Most tokens of one forward pass."""
    share_prompts: bool = True
    """Whether a group's prompt may be computed once for all of its samples."""
    pack: Literal["auto", "always", "never"] = "auto"
    """Whether to pack samples into one row without padding; see `learning.pack`."""
    sink: str
    """URI of the Parquet file to write."""
    examples: list[SampleTask] = Field(default=[])
    """Samples to return as text, for people to read."""
    trace: str | None = None
    """URI of the part of the run's trace to write, with the length of each response."""
    drafts: str | None = None
    """URI of the part to write with the responses that later steps draft tokens from."""
    visits: dict[int, int] = Field(default={})
    """Earlier visits of each prompt, for the trace; a missing prompt is on its first visit."""
    metrics_by_group: bool = False
    """Whether the result has the metrics of each group besides their sums."""


class BatchReference(Message):
    """The prepared samples of one training step."""

    step: int = Field(ge=1)
    parts: list[str]
    """URIs of the Parquet files that preparation wrote: all of them, unless the request follows a batch in
    preparation."""
    samples: list[SampleTask]
    """Every sample of the batch in the order of learning. Empty if the request follows a batch whose samples are still
    being chosen."""
    count: int = Field(default=0, ge=0)
    """Number of samples of such a batch."""
    pieces: list[Piece] = Field(default=[])
    """The division of the samples into pieces, whose gradients are accumulated one after the other; empty if the batch
    is learnt from as a whole. The last bits of the weights depend on it. Pieces need one optimizer update per step, and
    an algorithm that does not need the whole batch at once."""
    part_of: list[int] = Field(default=[])
    """For each sample, the number of the part in `parts` that holds it. Empty if no two parts hold samples with the
    same prompt and index, as in one rollout."""
    factors: list[float] = Field(default=[])
    """For each sample, the factor of its advantages, after any normalisation over the batch; empty if all are 1."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_numbers(len(self.samples), self.parts, self.part_of, self.factors)
        return self

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.samples) or self.count


class StepSettings(Message):
    """The settings of a step that may change during a job."""

    optimizer: OptimizerSettings
    total_steps: int = Field(ge=1)
    """Steps of the whole job, for the schedule."""


class Gang(Message):
    """Instances that take one training step together. Each gets its own request; the requests differ only in
    `number`."""

    size: int = Field(ge=2)
    """Number of instances."""
    number: int = Field(ge=0)
    """Number of this instance, from 0."""
    meeting: str
    """URI of the file in which the first instance publishes its address; a new one for each attempt."""
    within_seconds: float = Field(gt=0)
    """Longest time that an instance waits for the others."""


class UnpublishedVersion(Message):
    """A version that may not be published yet."""

    weights: str
    """URI of the folder for the weights, or for the adapter."""
    critic: str | None = None
    """URI of the folder for the critic."""
    since: str | None = None
    """URI of the version before, if what changed since then is published too."""


class LearnRequest(BaseRequest):
    """Learning: one training step, from weights `base` and `batch` to the next weights version."""

    task: Literal["learn"] = "learn"
    model: ModelSettings
    initial: WeightsReference
    """The original model (version 0). Without a checkpoint, a learner repeats the steps from it."""
    base: WeightsReference
    """Weights that the step starts from: version step − 1."""
    batch: BatchReference
    checkpoint: str | None = None
    """URI of the newest checkpoint (weights, critic, optimizer state); None before the first."""
    checkpoint_step: int = Field(default=0, ge=0)
    """Step of that checkpoint."""
    replay: list[BatchReference] = Field(default=[])
    """Batches of the steps after the checkpoint and before this one. A learner without the state in memory repeats
    these steps."""
    replay_settings: dict[int, StepSettings] = Field(default={})
    """Original settings of repeated steps, by step, if they differ from this request's."""
    following: str | None = None
    """Folder of the piece journal, if `batch` is still being prepared. The learner reads the pieces in the order of
    their numbers, and learns from each as soon as it exists. `batch.samples` or `batch.count` is known beforehand; the
    parts and pieces are not."""
    waits: bool = True
    """Whether the learner waits for a piece of `following` that is not there yet. If not, the task ends with
    `awaits_pieces`, and the instance keeps what it has learnt of the step."""
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
    """URI of the folder for the critic's next version."""
    save_checkpoint: str | None = None
    """URI of the folder for a checkpoint of this step, if one is due."""
    publish_beside: bool = False
    """Whether the learner may report `learnt` before it publishes. A learner publishes before it reports anything if it
    is not alone, if `save_checkpoint` is set, or if the host has too little memory for a copy of the weights."""
    unpublished: UnpublishedVersion | None = None
    """Version `base`, if its request was cut after `learnt`. The learner publishes it beside this step, unless that is
    done, and reports `published`. `done` and `learnt` of this step come later."""
    gang: Gang | None = None
    """The instances that take the step together; None if a single one takes it."""


class TakeUpRequest(BaseRequest):
    """Learning: load the state that a step starts from, before its batch is there."""

    task: Literal["take_up"] = "take_up"
    step: LearnRequest
    """The step as it will be requested, with an empty batch."""


class SaveRequest(BaseRequest):
    """Learning: publish the state of this version as a checkpoint; an instance that holds another one fails."""

    task: Literal["save"] = "save"
    version: int
    checkpoint: str


class ExportRequest(BaseRequest):
    """Learning: publish one weights version as a Hugging Face folder for the user."""

    task: Literal["export"] = "export"
    model: ModelSettings
    weights: WeightsReference
    destination: str
    """URI of the folder to publish."""
    model_card: str
    """Content of its README.md."""
    prompting: Prompting = Prompting()
    """The form of its prompts, for `prompting.json`."""


RunRequest = Annotated[
    MaterializeRequest
    | GenerationRequest
    | PrepareRequest
    | LearnRequest
    | TakeUpRequest
    | SaveRequest
    | ExportRequest,
    Field(discriminator="task"),
]

_REQUEST: TypeAdapter[RunRequest] = TypeAdapter(RunRequest)


class _Envelope(BaseModel):
    """The part of a request that is readable in every version."""

    protocol: str


def parse_request(body: bytes) -> RunRequest:
    """Read a request.

    Raises:
        UnsupportedProtocolError: the request has another major version.
        ValueError: the body is not a request; the message names the fields.
    """
    envelope = _Envelope.model_validate_json(body)
    check_protocol(envelope.protocol)
    return _REQUEST.validate_json(body)
