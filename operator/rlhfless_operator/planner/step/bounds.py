"""Lower bounds on instance-seconds: for given lengths within a given time, and for given work."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlhfless_operator.planner.latency.linear import Latency

Floats = NDArray[np.float64]


def lower_bound(
    lengths: Floats,
    contexts: Floats,
    latency: Latency,
    seconds: float,
    *,
    prefill_tokens: float,
    start_seconds: float = 0.0,
    max_batch: int | None = None,
) -> float:
    """Return a lower bound on the instance-seconds with which all samples can be done within `seconds`.

    It holds even for a policy that knows all lengths, moves samples and ships prefixes for free, takes and releases
    instances at any time, and drafts in each pass as many tokens for each sample as `latency` allows.
    docs/research/planner.md has the proof.

    Args:
        lengths: [samples] response tokens.
        contexts: [samples] tokens in each sample's context before its first response token.
        latency: of an instance, with its drafts.
        seconds: the time in which everything is done.
        prefill_tokens: prompt tokens that have to be computed at least once.
        start_seconds: seconds that every instance is charged before it works.
        max_batch: most sequences in a step.

    Returns:
        Instance-seconds; infinity if no schedule ends in that time.
    """
    available = seconds - start_seconds
    step_seconds = latency.lines[0].step_seconds
    least_passes = lengths / max(latency.tokens)
    slack = available - step_seconds * least_passes
    own = _own_seconds(lengths, contexts, latency)
    work = float(latency.prefill_token_seconds * prefill_tokens) + float(own.sum())
    if available <= 0 or float(slack.min()) < -1e-9 * available:
        return math.inf
    with np.errstate(divide="ignore", invalid="ignore"):
        root_work = _root_work(lengths, contexts, latency)
        rounds = root_work**2 / slack
    crowd = float(np.where(root_work > 0, rounds, 0.0).sum())
    passes = max(crowd, float(least_passes.sum()) / max_batch if max_batch else 0.0)
    # A sequence alone in its passes chooses its drafts by the whole pass.
    slowest = float((alone_seconds(lengths, contexts, latency) - own).max())
    busy = max(slowest, step_seconds * passes) + work
    if not math.isfinite(busy):
        return math.inf
    instances = max(1, math.ceil(busy / available * (1 - 1e-9)))
    return busy + instances * start_seconds


def alone_seconds(lengths: Floats, contexts: Floats, latency: Latency) -> Floats:
    """Return the least time in which each sample could decode, on an instance of its own [samples]."""
    bases = np.array([line.step_seconds + line.sequence_seconds for line in latency.lines])
    return _integral_of_least(bases, _slopes(latency), contexts, lengths)


def _own_seconds(lengths: Floats, contexts: Floats, latency: Latency) -> Floats:
    """Return the least seconds that each sample adds to its steps, besides their constant [samples]."""
    bases = np.array([line.sequence_seconds for line in latency.lines])
    return _integral_of_least(bases, _slopes(latency), contexts, lengths)


def _root_work(lengths: Floats, contexts: Floats, latency: Latency) -> Floats:
    """Return the least integral, over a response, of the square root of the seconds that its sequence adds to a step, a
    token [samples]."""
    # A pass with more tokens a pass costs √(seconds) / tokens a token: squared, that is linear in the context again.
    tokens = np.array(latency.tokens)
    bases = np.array([line.sequence_seconds for line in latency.lines]) / tokens
    return _integral_of_least(bases, _slopes(latency) / tokens, contexts, lengths, root=True)


def _slopes(latency: Latency) -> Floats:
    return np.array([line.context_seconds for line in latency.lines])


def _integral_of_least(bases: Floats, slopes: Floats, starts: Floats, lengths: Floats, *, root: bool = False) -> Floats:
    """Return the integrals from `starts` over `lengths` of the least of some lines, or of its root [samples]."""
    total = np.zeros(len(starts))
    at, line = 0.0, int(np.lexsort((slopes, bases))[0])
    ends = starts + lengths
    while True:
        flatter = np.flatnonzero(slopes < slopes[line] * (1 - 1e-12))
        crossings = (bases[flatter] - bases[line]) / (slopes[line] - slopes[flatter])
        until = float(crossings.min()) if len(flatter) else math.inf
        low, high = np.clip(starts, at, until), np.clip(ends, at, until)
        base, slope = bases[line], slopes[line]
        if not root:
            total += (high - low) * (base + slope * (low + high) / 2)
        elif slope == 0:
            total += (high - low) * math.sqrt(base)
        else:
            total += 2 / (3 * slope) * ((base + slope * high) ** 1.5 - (base + slope * low) ** 1.5)
        if until == math.inf:
            return total
        tied = flatter[crossings <= until * (1 + 1e-12)]
        at, line = until, int(tied[np.argmin(slopes[tied])])


def most_at_once(uses: Sequence[tuple[float, float]]) -> int:
    """Return the most pieces of work that are under way at a time.

    Args:
        uses: (begin, end) of each, in seconds.
    """
    changes = sorted([(begin, 1) for begin, _ in uses] + [(end, -1) for _, end in uses])
    return max(itertools.accumulate(change for _, change in changes), default=0)


def least_held(uses: Sequence[tuple[float, float]], *, start_seconds: float, drain_seconds: float) -> float:
    """Return the least instance-seconds that any choice of keeping and letting go could have cost.

    The moments of work are given, and each piece of work needs an instance. Between two uses an instance is either
    kept, which costs the gap, or let go, which costs a drain and a start. So a gap costs its length up to the cost of
    that switch: a concave function. For such a function the best match of gaps is nested: each use takes the instance
    that was freed last. (Of two gaps that cross, swapping their ends makes one longer and the other shorter by as much,
    and that costs no more.) Besides, each instance that is needed at once costs a start and a drain.

    Args:
        uses: (begin, end) of each piece of work, in seconds; an instance does one at a time.
        start_seconds: charged to an instance before it works.
        drain_seconds: charged to an instance from being let go until it is gone.

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
