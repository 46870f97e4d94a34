"""Learning from groups while others are generated, as the live loop does it where the job overlaps both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlhfless_operator.planner.step.chunks import least_chunk
from rlhfless_operator.planner.step.overlap import Floats, TrainerRun, queue
from rlhfless_operator.planner.step.pace import LearnerPace, begins_unknown, run_paced


@dataclass(frozen=True)
class Piece:
    """Groups that are prepared together and learnt from together."""

    ready: float
    """Moment at which they are prepared."""
    seconds: float
    """Seconds of learning from them."""
    groups: Sequence[int]


@dataclass(frozen=True)
class Preparation:
    """The pieces of a step in their order, and the instance-seconds of preparing them."""

    pieces: Sequence[Piece]
    held_seconds: float


def prepare_in_chunks(
    completions: Floats, preparation: Floats, learning: Floats, instances: int, *, begin: float, wake_seconds: float
) -> Preparation:
    """Prepare groups in chunks that become smaller towards the end.

    Args:
        completions: [groups] moments at which each is generated.
        preparation: [groups] seconds of one instance.
        learning: [groups] seconds of the learner.
        instances: number of instances that prepare.
        begin: moment from which they may.
        wake_seconds: an instance that waits for longer than a wake sleeps, and wakes for its next chunk.
    """
    order = np.argsort(completions, kind="stable")
    free = [-math.inf] * instances
    pieces: list[Piece] = []
    done, held = 0, 0.0
    while done < len(order):
        chosen = order[done : done + least_chunk(len(order) - done, instances)]
        done += len(chosen)
        place = int(np.argmin(free))
        start = max(begin, free[place], float(completions[chosen[-1]]))
        waits = start - free[place]
        wake = wake_seconds if waits > wake_seconds else 0.0
        seconds = float(preparation[chosen].sum())
        held += seconds + (wake or waits)
        free[place] = start + wake + seconds
        pieces.append(Piece(free[place], float(learning[chosen].sum()), chosen.tolist()))
    return Preparation(sorted(pieces, key=lambda piece: piece.ready), held)


def follow_on_slots(
    pieces: Sequence[Piece], expected: Floats | None, learning: Floats, pace: LearnerPace, gpus: int, free_from: float
) -> TrainerRun:
    """Learn from pieces on slots, in as many tasks as are worth it. Between two tasks the learner idles awake, because
    no task of the simulated job wants its slots. So it is charged for the gap, and needs no wake after it.

    Args:
        pieces: in their order.
        expected: [groups] moments at which they were expected; None if nothing was known.
        learning: [groups] seconds of the learner.
        pace: says when it begins; its start is a wake.
        gpus: number of GPUs of the learner.
        free_from: moment at which all of them are free.
    """
    complete = pieces[-1].ready
    asked: float | None = None
    now, done = max(0.0, free_from), 0
    while done < len(pieces):
        now = max(now, pieces[done].ready)
        came = [piece for piece in pieces[done:] if piece.ready <= now]
        coming = [group for piece in pieces[done + len(came) :] for group in piece.groups]
        backlog = sum(piece.seconds for piece in came)
        if expected is None:
            begin = now if begins_unknown(len(learning) - len(coming), len(learning)) else math.inf
        else:
            begin = pace.begins(now, backlog, expected[coming], learning[coming])
        if begin > now and now < complete:
            # A group that comes changes the forecast.
            after = [piece.ready for piece in pieces[done:] if piece.ready > now]
            now = min([begin, *after[:1]])
            continue
        if asked is None:
            asked, now = now, now + pace.start_seconds
        while done < len(pieces) and pieces[done].ready <= now:
            now += pieces[done].seconds
            done += 1
    assert asked is not None
    return TrainerRun(now, gpus, gpus * (now - asked), (asked,) * gpus)


def follow_apart(
    pieces: Sequence[Piece],
    expected: Floats,
    learning: Floats,
    pace: LearnerPace,
    gpus: int,
    free_from: Floats | None,
    update_seconds: float,
) -> TrainerRun:
    """Learn from pieces on GPUs of the learner's own, on which it may wait.

    Args:
        expected: [groups] moments at which they were expected.
        learning: [groups] seconds of the learner.
        pace: says when it begins, and when it is let go.
        free_from: [GPUs] moments from which they are free; None if the learner is there all the time.
        update_seconds: of the optimizer's step and the publication of the weights.
    """
    ready = np.empty(len(learning))
    for piece in pieces:
        ready[list(piece.groups)] = piece.ready
    if free_from is None:
        end = float(queue(ready, learning).max()) + update_seconds
        return TrainerRun(end, gpus, gpus * end, (0.0,) * gpus)
    return run_paced(ready, expected, learning * gpus, free_from, gpus, pace, update_seconds=update_seconds)
