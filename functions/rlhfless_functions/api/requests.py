"""What the control plane asks of a function: one request is the work of one stage, or a part of it."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, TypeAdapter

from rlhfless_functions.api.messages import (
    PROTOCOL,
    Message,
    Purpose,
    SampleTask,
    TaskKey,
    WeightsReference,
    check_protocol,
)
from rlhfless_functions.api.pieces import Piece
from rlhfless_functions.settings import (
    AlgorithmSettings,
    BatchSettings,
    DataSettings,
    EngineSampling,
    EngineSettings,
    LearningSettings,
    ModelSettings,
    OptimizerSettings,
    RewardSettings,
    SamplingSettings,
)


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
    rewards: list[RewardSettings] = Field(default=[])
    """What will score the responses, and so has to find what it needs in every row."""
    most_dropped: float = Field(default=1.0, ge=0, le=1)
    """Largest share of the rows that may be left out."""


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
    sampling: EngineSampling
    seed: int
    """The job's seed; each sample's generator is made from (seed, purpose, step, prompt, index)."""
    sink: str
    """URI of the folder that this attempt writes its rollout parts to."""
    resume_from: list[str] = Field(default=[])
    """Sinks of earlier attempts, or single parts of them: samples finished there are not generated again, partial ones
    are continued."""
    known_until: dict[str, str] = Field(default={})
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
    drafts: list[str] | None = None
    """URIs of folders with responses of earlier steps, from which tokens may be drafted, the newest step's last; none
    are read where the list is empty, and nothing is drafted if it is left out. The samples do not depend on it."""


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
    sampling: EngineSampling
    policy: WeightsReference
    """Weights that generated; the tokenizer is theirs."""
    old_log_probs: bool
    """Whether log-probabilities of `policy` are wanted: for a distance in the reward, or while the policy is frozen.
    The learner's ratios are to those that it computes itself."""
    reference: WeightsReference | None = None
    """Weights of the frozen reference; with an adapter being trained, the backbone alone."""
    critic: WeightsReference | None = None
    """Weights of the value model."""
    microbatch_tokens: int = Field(ge=1)
    """Tokens of one forward pass."""
    share_prompts: bool = True
    """Whether a group's prompt may be computed once for all of its samples."""
    pack: Literal["auto", "always", "never"] = "auto"
    """Whether samples are passed in one row without padding; see `learning.pack`."""
    sink: str
    """URI of the Parquet file to write."""
    examples: list[SampleTask] = Field(default=[])
    """Those of the samples that come back as text, for people to read."""
    trace: str | None = None
    """URI of the part of the run's trace to write: how long each response was."""
    drafts: str | None = None
    """URI of the part to write of what later steps draft tokens from: the responses."""
    visits: dict[int, int] = Field(default={})
    """Earlier visits of each prompt, for the trace; a prompt that is not here is on its first."""


class BatchReference(Message):
    """The prepared samples of one training step."""

    step: int = Field(ge=1)
    parts: list[str]
    """URIs of the Parquet files that preparation wrote; all of them, unless a request says that it follows the rest."""
    samples: list[SampleTask] = Field(min_length=1)
    """Every sample of the batch in the order of learning."""
    pieces: list[Piece] = Field(default=[])
    """How the samples are divided into pieces whose gradients are accumulated one after the other; empty where the
    batch is learnt from as a whole. The last bits of the weights depend on it. Pieces need an optimizer update that is
    the whole step's, and an algorithm that asks nothing of the whole batch."""


class StepSettings(Message):
    """What a step was taken with, of all that may change in the middle of a job."""

    optimizer: OptimizerSettings
    total_steps: int = Field(ge=1)
    """Steps of the whole job, for the schedule."""


class Gang(Message):
    """Instances that take one training step together; each has a request of its own, which says the same but for its
    `number`."""

    size: int = Field(ge=2)
    """How many they are."""
    number: int = Field(ge=0)
    """Which of them this one is, from 0."""
    meeting: str
    """URI of the file in which the first one says where the others find it; a new one for each attempt."""
    within_seconds: float = Field(gt=0)
    """Longest time that one waits for the others."""


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
    replay: list[BatchReference] = Field(default=[])
    """Batches of the steps after the checkpoint and before this one, for a learner without the state in memory."""
    replay_settings: dict[int, StepSettings] = Field(default={})
    """By step, what replayed steps were first taken with, where that is not what this request says."""
    following: str | None = None
    """Where `batch` is still being prepared: the folder of its piece journal. The learner reads the pieces in the order
    of their numbers, and learns from each as soon as it is there. The names of `batch.samples` are known beforehand,
    its parts and pieces are not."""
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
    gang: Gang | None = None
    """The instances that take the step together; None where one takes it."""


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

_REQUEST: TypeAdapter[RunRequest] = TypeAdapter(RunRequest)


class _Envelope(BaseModel):
    """The part of a request that must be readable whatever its version."""

    protocol: str


def parse_request(body: bytes) -> RunRequest:
    """Read a request.

    Raises:
        UnsupportedProtocolError: for another major version.
        ValueError: for anything else that is no request; the message names the fields.
    """
    envelope = _Envelope.model_validate_json(body)
    check_protocol(envelope.protocol)
    return _REQUEST.validate_json(body)
