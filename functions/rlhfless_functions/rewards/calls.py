"""One call of a reward in a worker. Converts its result to plain values, and its failure to one sentence."""

import asyncio
import inspect
import os
import signal
import sys
import traceback
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rlhfless_functions.rewards.groups import START, Progress, RewardGroup

_PACKAGE = "rlhfless_functions."
Answer = dict[str, Any]
"""`index` of the group, `metrics`, and either `scores` (a number or None per response) or `error`."""


@dataclass
class Call:
    """Further input and output of a call, besides the group and the scores."""

    progress: Progress = START
    """Position of the training."""
    metrics: list[tuple[str, float]] = field(default_factory=list)
    """Numbers that the reward logs (TRL's `log_metric`)."""


Scorer = Callable[[RewardGroup, Call], Any]
"""Scores one group: a list with a number or None (unscorable) per response, or an awaitable of one."""


def answer_in_turn(scorer: Scorer, groups: list[RewardGroup], progress: Progress) -> Iterator[Answer]:
    """Call a reward once per group, in the main thread, in which it may use signals."""
    home = os.getpid()
    for index, group in enumerate(groups):
        call = Call(progress)
        try:
            answer: Answer = {"scores": plain_scores(_settled(scorer(group, call)))}
        except BaseException as error:
            answer = {"error": describe(error)}
        if os.getpid() != home:
            # The reward forked, and this is the child, which must not answer again.
            os._exit(0)
        # An alarm that a reward leaves behind must not go off in the next call.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        yield {"index": index, "metrics": call.metrics, **answer}


async def answer_together(
    scorer: Scorer, groups: list[RewardGroup], progress: Progress, timeout: float
) -> AsyncIterator[Answer]:
    """Await a reward for all groups at once, each within `timeout` seconds; yield answers as they are ready."""

    async def one(index: int, group: RewardGroup) -> Answer:
        call = Call(progress)
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                answer: Answer = {"scores": plain_scores(await scorer(group, call))}
        except BaseException as error:
            answer = {"error": f"took longer than {timeout:g} s" if limit.expired() else describe(error)}
        return {"index": index, "metrics": call.metrics, **answer}

    for answered in asyncio.as_completed([one(index, group) for index, group in enumerate(groups)]):
        yield await answered


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the main thread's event loop, which lives as long as the worker: clients, locks and tasks that a reward
    keeps from one call to the next belong to it."""
    with warnings.catch_warnings():
        # A loop that the reward's file made when it was imported is the one to keep.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return asyncio.get_event_loop()
        except RuntimeError:
            asyncio.set_event_loop(asyncio.new_event_loop())
            return asyncio.get_event_loop()


def _settled(result: Any) -> Any:
    """Return what an awaitable gives, such as that of an async function behind a decorator; others as they are."""
    return event_loop().run_until_complete(result) if hasattr(result, "__await__") else result


def is_async(function: Any) -> bool:
    """Return whether calling `function` gives an awaitable."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def plain_scores(result: Any) -> list[float | None]:
    """Return numbers of any kind (NumPy's and torch's too) as floats.

    Raises:
        TypeError: the value is not a sequence of numbers and Nones.
    """
    if isinstance(result, str | bytes | dict) or not hasattr(result, "__iter__"):
        raise TypeError(f"returned {_shown(result)}, not a list with one number or None per response")
    return [None if score is None else plain_number(score) for score in result]


def plain_number(score: Any) -> float:
    """Return a number of any kind as a float.

    Raises:
        TypeError: the value is not a number, such as `"1.0"`.
    """
    if isinstance(score, str | bytes) or not hasattr(score, "__float__"):
        raise TypeError(f"returned {_shown(score)}, not a number or None")
    return float(score)


_CHATS = (
    "; if it reads completions as chat messages: they are messages where prompts are, in columns such as `messages` or"
    " by data.systemPrompt"
)


def describe(error: BaseException) -> str:
    """Describe an exception in one sentence. The whole traceback goes to stderr, which the parent logs."""
    traceback.print_exception(error)
    sys.stderr.flush()
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}){_place(error.__traceback__)}"
    if isinstance(error, MemoryError):
        return f"ran out of memory{_place(error.__traceback__)}; its limit is reward.memory"
    if isinstance(error, TypeError) and str(error).startswith("returned "):
        return str(error)
    if isinstance(error, LookupError) and type(error).__module__.startswith(_PACKAGE):
        return f"can't score a row: {error}"
    if isinstance(error, TypeError) and str(error).startswith("string indices must be integers"):
        return f"raised TypeError: {error}{_place(error.__traceback__)}{_CHATS}"
    return f"raised {type(error).__name__}: {error}{_place(error.__traceback__)}"


def _place(trace: TracebackType | None) -> str:
    """Return the place in the user's code: the innermost frame outside this package."""
    here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib is not worth its import in a worker
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(here)]
    return f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""  # noqa: PTH119


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
