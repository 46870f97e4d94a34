"""How long an instance takes: the linear model that plans are made with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearLatency:
    """A decode step of a batch takes `step_seconds` plus, for each sequence, a part that grows with its context.

    The constant is the reading of the weights; the rest is the reading of the KV cache and the arithmetic.
    """

    step_seconds: float
    """Seconds of a decode step whatever its batch: the `a` of a + c·b."""
    sequence_seconds: float = 0.0
    """Seconds that each sequence adds to a decode step: the `c`."""
    context_seconds: float = 0.0
    """Seconds that each token in a sequence's context adds to a decode step."""
    prefill_token_seconds: float = 0.0
    """Seconds for each prompt token."""

    def __post_init__(self) -> None:
        for name in ("step_seconds", "sequence_seconds", "context_seconds", "prefill_token_seconds"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}: a latency is 0 or more seconds")
        if self.step_seconds + self.sequence_seconds + self.context_seconds == 0:
            raise ValueError("step_seconds is 0 and so are the others: decoding takes some time")

    def decode_seconds(self, batch: int, context: float) -> float:
        """Seconds of one decode step of `batch` sequences with a mean context of `context` tokens."""
        return self.step_seconds + batch * (self.sequence_seconds + self.context_seconds * context)

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to compute `tokens` prompt tokens."""
        return self.prefill_token_seconds * tokens

    def sequence_work(self, context: float, tokens: float) -> float:
        """Seconds that a sequence adds to its batch while it grows by `tokens` from a context of `context` tokens."""
        return self.sequence_seconds * tokens + self.context_seconds * tokens * (context + tokens / 2)
