"""The switch of an actor to newer weights in the middle of its responses. Pure."""

from rlhfless_operator.planner.latency.linear import Latency
from rlhfless_operator.planner.moves.migration import Actor

COST_SHARE = 0.1
"""Largest share of an actor's time left that a switch may cost."""


def is_worth_switching(
    actor: Actor,
    latency: Latency,
    pause_seconds: float,
    prefill_tokens: int | None = None,
    *,
    cost_share: float = COST_SHARE,
) -> bool:
    """Return whether an actor has enough left to decode with newer weights.

    A switch costs a pause and the prefill of the contexts. The actor switches if that is at most `cost_share` of the
    time that its responses are expected to take from here on.

    Args:
        actor: the actor, with its samples assessed (`Migration.assess`).
        latency: of its instance.
        pause_seconds: to end the stream, make a new request and load the weights.
        prefill_tokens: number of tokens whose keys and values are computed anew; by default all contexts.
        cost_share: largest share of the time left that the switch may cost.
    """
    if not actor.samples:
        return False
    line = latency.at(len(actor.samples), actor.context / len(actor.samples))
    left = line.step_seconds * actor.rounds + actor.work(line)
    tokens = actor.context if prefill_tokens is None else prefill_tokens
    return pause_seconds + latency.prefill_token_seconds * tokens <= cost_share * left
