"""The parts of a generation request besides its samples."""

from pydantic import Field

from rlhfless_functions.api.messages import Message, WeightsReference


class SharedPrefix(Message):
    """A prefix of one of the share's prompts that prompts of other actors share."""

    prompt: int
    """Row of the prompt."""
    tokens: int = Field(ge=1)
    """Number of its first tokens."""
    source: bool
    """Whether this actor computes it for the others; otherwise it reads what another actor wrote."""


class SharedPrefixes(Message):
    """The prefixes that one actor computes for others, and those that it reads from them, if its engine can."""

    folder: str
    """URI of the folder of the step's keys and values."""
    prefixes: list[SharedPrefix] = Field(min_length=1)
    """At most one prefix of each prompt."""
    wait_seconds: float = Field(default=30.0, ge=0)
    """Longest wait for another actor, after which this actor computes the prefix itself."""


class NextWeights(Message):
    """Weights that may be published while a request decodes with older ones."""

    weights: WeightsReference
    weights_from: list[str] | None = None
    """The chain for them; see `GenerationRequest.weights_from`."""
    weights_line: str | None = None
    """The line for them; see `GenerationRequest.weights_line`."""


class Shelter(Message):
    """A process that keeps the episodes of a rollout. Actors may be let go while environments work."""

    url: str
    """Its address."""
    token: str
    """Its bearer token."""
    rollout: str
    """Name of the rollout."""
    actors: int = Field(ge=1)
    """Number of actors with which it begins."""
    patience_seconds: float = Field(ge=0)
    """Seconds of waiting, of all samples of a request together, after which the request ends."""


class LiveBatch(Message):
    """The batch of a request whose body stays open; see `api.live`."""

    sequences: int = Field(ge=1)
    """Most samples that are decoded at a time, if the engine has room for them."""
    prompt_tokens: int = Field(ge=1)
    """Tokens of the longest prompt that may come."""
