"""When an actor goes on with newer weights in the middle of its responses. Pure."""

from rlhfless_operator.planner.latency.linear import Latency
from rlhfless_operator.planner.moves.migration import Actor

COST_SHARE = 0.1
"""Most of the time that an actor has left which a switch may cost."""


def is_worth_switching(
    actor: Actor,
    latency: Latency,
    pause_seconds: float,
    prefill_tokens: int | None = None,
    *,
    cost_share: float = COST_SHARE,
) -> bool:
    """Whether an actor has enough left to decode with newer weights.

    A switch costs a pause and the prefill of the contexts. The actor switches if that is at most a tenth of what its
    responses are expected to take from here on.

    Args:
        actor: what it holds, with what is expected of each sample (`Migration.assess`).
        latency: of its instance.
        pause_seconds: closing the stream, a new request, and loading the weights.
        prefill_tokens: whose keys and values are computed anew; by default those of all contexts.
        cost_share: most of the time left that the switch may cost.
    """
    if not actor.samples:
        return False
    line = latency.at(len(actor.samples), actor.context / len(actor.samples))
    left = line.step_seconds * actor.rounds + actor.work(line)
    tokens = actor.context if prefill_tokens is None else prefill_tokens
    return pause_seconds + latency.prefill_token_seconds * tokens <= cost_share * left
