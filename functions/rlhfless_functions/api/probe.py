"""What `rlhfless probe` asks of a process of the functions, and what comes back. It is no stage's request."""

from typing import Literal

from pydantic import Field

from rlhfless_functions.api.messages import Message
from rlhfless_functions.settings import DataSettings, ModelSettings


class ProbedModel(Message):
    """A model to probe."""

    name: str
    """For people."""
    step: int | None = None
    """Training step that made it, if one did."""
    model: ModelSettings
    """The model, or the one that its job began with."""
    checkpoint: str | None = None
    """Folder of the checkpoint whose weights take the place of the model's own."""


class Probe(Message):
    """Measure how suited models are to early exit, on responses of their own."""

    models: list[ProbedModel] = Field(min_length=1)
    """One after the other, with the same prompts and random numbers."""
    data: DataSettings
    prompts: int = Field(ge=1)
    """How many of the data's first prompts are answered."""
    samples: int = Field(ge=1)
    """Responses to each."""
    temperature: float = Field(ge=0)
    """0 takes the likeliest token each time."""
    max_prompt_tokens: int = Field(ge=1)
    """Longer prompts are left out."""
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Longest response; 256, or what the model's positions leave, if left out."""
    stop: list[str] = Field(default=[])
    """Strings that end a response."""
    seed: int
    agreement: float = Field(gt=0, le=1)
    """Share of tokens that must stay the same where layers are skipped."""
    draft: bool = False
    """Whether to decode some responses with drafts, too."""
    threads: int | None = Field(default=None, ge=1)
    """Of torch on a CPU; its own choice if left out."""


class LayerReadout(Message):
    """What the read-out of one layer says where the whole model drew a token: shares and means over tokens."""

    layer: int
    """From 1; the last is the whole model."""
    greedy: float
    """How often its likeliest token is the whole model's likeliest."""
    drawn: float
    """How often the same random number draws the whole model's token from it. The last layer's says how far this pass
    and the decoding agree."""
    likeliest: float
    """How often its likeliest token is the one that the whole model drew."""
    probability: float
    """Mean probability that it gives to the token that the whole model drew."""
    confidence: float
    """Mean probability of its likeliest token."""
    settled: float
    """How often this layer and all later ones draw the whole model's token."""


class SkippedLayers(Message):
    """What could be skipped while the drawn tokens stay the same as often as is asked for."""

    agreement: float
    """What is asked for."""
    layer: int
    """Where all tokens could leave; the last layer if none is right often enough."""
    one_layer: float
    """The share of layers behind it."""
    threshold: float | None
    """Or each token leaves where its read-out's likeliest token has this probability; null if no threshold will do."""
    by_confidence: float
    """Mean share of layers behind the one where a token leaves."""


class ExitDrafts(Message):
    """The fastest drafts of an exit, by counted cycles and measured times."""

    layer: int
    """Layers that a draft passes."""
    drafts: int
    """Most tokens that are drafted at a time."""
    choice: Literal["drawn", "likeliest"]
    """Which token of the read-out is the draft."""
    tokens_per_pass: float
    """Tokens that a pass of the whole model comes to."""
    draft_cost: float
    """Time of a draft, relative to a pass of the whole model."""
    speed: float
    """Expected tokens a second, relative to plain decoding of one sequence."""


class DraftedDecoding(Message):
    """Responses decoded with drafts and without, one sequence at a time."""

    responses: int
    identical: int
    """Responses whose drafted tokens are the plain ones."""
    tokens: int
    tokens_per_pass: float
    plain_tokens_per_second: float
    tokens_per_second: float
    speed: float
    """The ratio of both."""


class ModelProbe(Message):
    """How suited a model is to early exit."""

    name: str
    step: int | None
    layers: int
    responses: int
    tokens: int
    """Of the responses."""
    suitability: float
    """Mean share of layers behind the one where a token's draw is settled, from 0 to 1."""
    skipped: SkippedLayers
    by_layer: list[LayerReadout]
    exits: list[ExitDrafts] = Field(default=[])
    """One for each layer but the last."""
    plain_seconds: float | None = None
    """Of a token in plain decoding of one sequence, by which costs are measured."""
    best: ExitDrafts | None = None
    """The fastest of them; null for a model of one layer."""
    pays: bool = False
    """Whether it is expected to be faster than plain decoding."""
    decoded: DraftedDecoding | None = None
    """What came of it, where it was tried."""


class ProbeResult(Message):
    """What came of it."""

    models: list[ModelProbe] = Field(default=[])
    device: str = ""
    """Where it was measured."""
    threads: int | None = None
    """Of torch on a CPU."""
    error: str | None = None
    """Why nothing could be measured."""
