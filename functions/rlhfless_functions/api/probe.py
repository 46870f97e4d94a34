"""The request and the result of `rlhfless probe`. It belongs to no stage."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.api.messages import Message
from rlhfless_functions.settings import DataSettings, ModelSettings


class ProbedModel(Message):
    """A model to probe."""

    name: str
    """Name for people."""
    step: int | None = None
    """Training step that made it, if any."""
    model: ModelSettings
    """The model, or the model that its job started from."""
    checkpoint: str | None = None
    """Folder of the checkpoint whose weights replace the model's own."""


class Probe(Message):
    """Measure how suited models are to early exit, on responses of their own."""

    models: list[ProbedModel] = Field(min_length=1)
    """Models to probe one after the other, with the same prompts and random numbers."""
    data: DataSettings
    prompts: int = Field(ge=1)
    """Number of the data's first prompts to answer."""
    samples: int = Field(ge=1)
    """Responses to each prompt."""
    temperature: float = Field(ge=0)
    """0 always takes the likeliest token."""
    max_prompt_tokens: int = Field(ge=1)
    """Longest prompt; longer ones are skipped."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Longest response; by default 256, or as many tokens as the model's positions allow."""
    stop: list[str] = Field(default=[])
    """Strings that end a response."""
    seed: int
    agreement: float = Field(gt=0, le=1)
    """Share of tokens that must stay the same when layers are skipped."""
    draft: bool = False
    """Whether to decode some responses with drafts, too."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of torch on a CPU; by default torch's own choice."""


class LayerReadout(Message):
    """The read-out of one layer, compared with the tokens that the whole model drew: shares and means over tokens."""

    layer: int
    """Number of the layer, from 1; the last is the whole model."""
    greedy: float
    """Share of tokens at which its likeliest token is the whole model's likeliest."""
    drawn: float
    """Share of tokens at which the same random number draws the whole model's token from it. The last layer's value
    shows how well this pass and the decoding agree."""
    likeliest: float
    """Share of tokens at which its likeliest token is the one that the whole model drew."""
    probability: float
    """Mean probability that it gives to the token that the whole model drew."""
    confidence: float
    """Mean probability of its likeliest token."""
    settled: float
    """Share of tokens at which this layer and all later ones draw the whole model's token."""


class SkippedLayers(Message):
    """Layers that could be skipped while the wanted share of drawn tokens stays the same."""

    agreement: float
    """The wanted share."""
    layer: int
    """Layer at which all tokens could leave; the last layer if none is right often enough."""
    one_layer: float
    """Share of layers behind it."""
    threshold: float | None
    """Alternative: each token leaves at the layer whose likeliest token has this probability; null if no threshold
    works."""
    by_confidence: float
    """Mean share of layers behind the one where a token leaves."""


class ExitDrafts(Message):
    """The fastest drafts of an exit, by counted cycles and measured times."""

    layer: int
    """Layers of a draft."""
    drafts: int
    """Most tokens that are drafted at a time."""
    choice: Literal["drawn", "likeliest"]
    """`drawn`: the draft is drawn from the read-out with the token's own random number. `likeliest`: it is the
    read-out's likeliest token."""
    tokens_per_pass: float
    """Tokens per pass of the whole model."""
    draft_cost: float
    """Time of a draft, relative to a pass of the whole model."""
    speed: float
    """Expected tokens a second, relative to plain decoding of one sequence."""


class DraftedDecoding(Message):
    """Responses decoded with and without drafts, one sequence at a time."""

    responses: int
    identical: int
    """Responses whose drafted tokens equal the plain ones."""
    tokens: int
    tokens_per_pass: float
    plain_tokens_per_second: float
    tokens_per_second: float
    speed: float
    """The ratio of both."""


class ModelProbe(Message):
    """The suitability of a model for early exit."""

    name: str
    step: int | None
    layers: int
    responses: int
    tokens: int
    """Response tokens."""
    suitability: float
    """Mean share of layers behind the one where a token's draw is settled, from 0 to 1."""
    skipped: SkippedLayers
    by_layer: list[LayerReadout]
    exits: list[ExitDrafts] = Field(default=[])
    """One for each layer but the last."""
    plain_seconds: float | None = None
    """Seconds of a token in plain decoding of one sequence. Costs are relative to it."""
    best: ExitDrafts | None = None
    """The fastest of them; null for a model of one layer."""
    pays: bool = False
    """Whether it is expected to be faster than plain decoding."""
    decoded: DraftedDecoding | None = None
    """The measured result, if drafting was tried."""


class ProbeResult(Message):
    """The result of a probe."""

    models: list[ModelProbe] = Field(default=[])
    device: str = ""
    """Device of the measurement."""
    threads: int | None = None
    """Threads of torch on a CPU."""
    error: str | None = None
    """Reason why nothing could be measured."""
