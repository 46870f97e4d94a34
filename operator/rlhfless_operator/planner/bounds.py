"""Lower bounds: the least instance-seconds for given lengths and a given time, and for given work."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency import LinearLatency

Floats = NDArray[np.float64]


def lower_bound(
    lengths: Floats,
    contexts: Floats,
    latency: LinearLatency,
    seconds: float,
    *,
    prefill_tokens: float,
    start_seconds: float = 0.0,
    max_batch: int | None = None,
) -> float:
    """The least instance-seconds with which all samples can be done within `seconds`.

    It holds for anyone who knows all lengths, moves samples between instances for free whenever it helps, ships
    prefixes for free and takes and releases instances at any time. docs/planner.md has the proof.

    Args:
        lengths: [samples] response tokens.
        contexts: [samples] tokens in each sample's context before its first response token.
        seconds: the time in which everything is done.
        prefill_tokens: prompt tokens that have to be computed at least once.
        start_seconds: seconds that every instance is charged before it works.
        max_batch: most sequences in a step.

    Returns:
        Instance-seconds; infinity where nobody can be done in that time.
    """
    available = seconds - start_seconds
    slack = available - latency.step_seconds * lengths
    work = float(latency.prefill_token_seconds * prefill_tokens) + float(
        np.sum(lengths * (latency.sequence_seconds + latency.context_seconds * (contexts + lengths / 2)))
    )
    slowest = float(lengths.max())
    if available <= 0 or float(slack.min()) < -1e-9 * available:
        return math.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        rounds = _root_work(lengths, contexts, latency) ** 2 / slack
    crowd = float(np.where(lengths > 0, rounds, 0.0).sum())
    steps = max(slowest, crowd, float(lengths.sum()) / max_batch if max_batch else 0.0)
    busy = latency.step_seconds * steps + work
    if not math.isfinite(busy):
        return math.inf
    instances = max(1, math.ceil(busy / available * (1 - 1e-9)))
    return busy + instances * start_seconds


def _root_work(lengths: Floats, contexts: Floats, latency: LinearLatency) -> Floats:
    """[samples] integral over a response of the square root of the seconds that its sequence adds to a step."""
    base, slope = latency.sequence_seconds, latency.context_seconds
    if slope == 0:
        return lengths * math.sqrt(base)
    first = base + slope * contexts
    result: Floats = 2 / (3 * slope) * ((first + slope * lengths) ** 1.5 - first**1.5)
    return result


def least_held(uses: Sequence[tuple[float, float]], *, start_seconds: float, drain_seconds: float) -> float:
    """The least instance-seconds that any choice of keeping and letting go could have cost.

    Work comes when it comes, and needs an instance each time. Between two uses an instance is either kept, which costs
    the gap, or let go, which costs a drain and a start. So a gap costs its length up to the cost of that switch: a
    concave function. For such a function the best match of gaps is nested: each use takes the instance that was freed
    last. (Of two gaps that cross, swapping their ends makes one longer and one shorter by as much, and that costs no
    more.) What remains is a start and a drain for each instance that is needed at once.

    Args:
        uses: (begin, end) of each piece of work, in seconds; an instance does one at a time.
        start_seconds: what an instance is charged before it works.
        drain_seconds: what it is charged from being let go until it is gone.

    Returns:
        Instance-seconds; 0 without work.
    """
    switch = start_seconds + drain_seconds
    # An instance that is freed at the moment that other work begins may do it.
    moments = sorted([(begin, 1) for begin, _ in uses] + [(end, 0) for _, end in uses])
    free: list[float] = []
    cost = 0.0
    for at, begins in moments:
        if not begins:
            free.append(at)
            cost += at
        else:
            cost += (min(at - free.pop(), switch) if free else switch) - at
    return cost
