"""The model that an instance loads before it is ready, for its first request."""

from rlhfless_functions.api.messages import Message, WeightsReference
from rlhfless_functions.settings import EngineSettings, ModelSettings


class Preload(Message):
    """The model to load."""

    model: ModelSettings
    weights: WeightsReference
    engine: EngineSettings | None = None
    """Engine of a generation instance."""
    weights_line: str | None = None
    """Place where generation instances that fetch the weights find each other; see `GenerationRequest.weights_line`."""
