"""The common parts of requests, results and events: their base, their references, and the version of the contract."""

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

PROTOCOL = "1.0"
"""Version of this contract, MAJOR.MINOR. Fields may be added in a minor version; readers ignore unknown ones."""

Stage = Literal["generation", "preparation", "learning"]
STAGES: tuple[Stage, ...] = get_args(Stage)
"""Stages in the order of a step."""
Purpose = Literal["training", "evaluation"]
FinishReason = Literal["stop", "truncated", "cut", "turn"]
"""`stop`: EOS or a stop string. `truncated`: the longest response was reached. `cut`: moved or drained, unfinished.
`turn`: a turn has ended, and the environment has not answered."""


class UnsupportedProtocolError(ValueError):
    """The request or event speaks a major version of the contract that this code does not know."""


class Message(BaseModel):
    """The base of everything on the wire: frozen, strict about types, tolerant of unknown fields."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True, allow_inf_nan=False
    )


class TaskKey(Message):
    """The idempotency key. Two requests with equal keys request the same work."""

    job_uid: str
    """Unique id of the job's incarnation; `--fresh` makes a new one."""
    step: int = Field(ge=0)
    """Training step of the work; 0 is before the first."""
    stage: Stage
    """Stage of the function that does it."""
    part: str
    """Part of the stage's work: an actor's share, a chunk of groups, an evaluation."""
    attempt: int = Field(ge=0)
    """Number of the attempt at that part."""


class WeightsReference(Message):
    """An immutable set of weights, named by the step that made it: a Hugging Face folder, and with LoRA the peft folder
    of its adapter."""

    # The status of a job has references too, which the CRD has never bounded.
    version: Annotated[int, Field(ge=0), WithJsonSchema({"type": "integer"})]
    """Step that made it; 0 is the original model."""
    uri: str
    """Its folder."""
    adapter: str | None = None
    """Folder of its adapter, with LoRA."""


class WeightsFetched(Message):
    """Counts of the files fetched from an object store for a request's weights; zeros if the store is a file system."""

    bytes: int = 0
    deltas: int = 0
    """Files made from the version before and a delta."""
    refused_deltas: int = 0
    """Files fetched whole because their delta was missing or damaged."""
    relayed_bytes: int = 0
    """Bytes fetched from other instances; `bytes` does not include them."""
    refused_sources: int = 0
    """Instances that did not send what they were asked for. The store was read instead."""
    prefetched: int = 0
    """1 if the weights were in the instance's memory already when the request asked for them."""


class DecodeCounts(Message):
    """Counts of the decoding of a share; zeros if the engine does not count."""

    passes: int = 0
    """Decode passes."""
    sequence_passes: int = 0
    """Sum over passes of the sequences in each. Each sequence got one token, or several drafted ones."""
    tokens: int = 0
    """Response tokens from those passes."""
    drafted: int = 0
    """Drafted tokens."""
    accepted: int = 0
    """Drafted tokens that equal the sampled ones."""
    judged: int = 0
    """Drafted tokens that were right, plus the first wrong one of each sequence and pass. Later ones are not judged."""
    looked_up: int = 0
    """Sum over passes of the sequences for which drafts were looked up."""
    matched: int = 0
    """Sequences among them that had something to draft."""
    drafting_seconds: float = 0.0
    """Seconds to look up drafts."""
    unreadable: int = 0
    """Parts of the history that could not be used for drafts."""
    kept_tokens: int = 0
    """Tokens whose keys and values were kept from the request before, and not computed anew. A prompt of several
    responses counts once."""
    kept_responses: int = 0
    """Responses that continued with kept keys and values."""


class SampleTask(Message):
    """One response to generate: the `index`-th of the group of `prompt`."""

    prompt: int = Field(ge=0)
    """Row of the prompt in the materialised dataset."""
    index: int = Field(ge=0)
    """Number of the sample in its group."""


def check_protocol(version: object) -> None:
    """Refuse an unknown major version.

    Raises:
        UnsupportedProtocolError: the major version is unknown; the message names both versions.
    """
    ours = PROTOCOL.split(".")[0]
    if not isinstance(version, str) or version.split(".")[0] != ours:
        raise UnsupportedProtocolError(
            f"protocol version {version!r} is not supported: this side uses {PROTOCOL};"
            f" use the same release of rlhfless on both sides"
        )
