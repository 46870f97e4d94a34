"""The lines that follow a live request in its body, and what they do to its batch.

A request with `live` keeps its body open. The instance decodes its samples in one batch, to which lines add others, of
this step or another one, and from which they take some back. `weights` swaps other weights in between two passes. The
end of the body means that no more samples come: the task ends once the batch is empty. Closing the answer cuts all of
it, as of any request.

Events that speak of one share name its sink in `of`. A share is the samples of one sink.
"""

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from rlhfless_functions.api.generation import NextWeights
from rlhfless_functions.api.messages import Message, SampleTask
from rlhfless_functions.api.requests import GenerationRequest


class Join(Message):
    """A share joins the batch. It has the model, the engine and the sampling of the request that opened it, and the
    weights of the batch sample it, which are no older than its own."""

    line: Literal["join"] = "join"
    request: GenerationRequest


class AddSamples(Message):
    """A share gets more samples, which wait behind all others."""

    line: Literal["add"] = "add"
    sink: str
    """Sink of the share."""
    samples: list[SampleTask] = Field(min_length=1)
    resume_from: list[str] = Field(default=[])
    """As in `GenerationRequest`, for these samples."""
    known_until: dict[str, str] = Field(default={})
    """As in `GenerationRequest`, for these samples."""


class Leave(Message):
    """A share leaves the batch. The instance publishes what there is of it, and sends its `done`."""

    line: Literal["leave"] = "leave"
    sink: str
    """Sink of the share."""


class NewWeights(Message):
    """Every response goes on with these weights, from its next token on. They are older than those before only if no
    response is left."""

    line: Literal["weights"] = "weights"
    present: NextWeights
    next_weights: list[NextWeights] = Field(default=[])
    """As in `GenerationRequest`."""


Line = Annotated[Join | AddSamples | Leave | NewWeights, Field(discriminator="line")]

_LINE: TypeAdapter[Line] = TypeAdapter(Line)


def dump_line(line: Line) -> bytes:
    """Return one line of a live request's body."""
    return line.model_dump_json().encode() + b"\n"


def parse_line(line: bytes) -> Line:
    """Read one line of a live request's body.

    Raises:
        ValueError: it is none; the message names the fields.
    """
    return _LINE.validate_json(line)
