"""The seam between generation and environments: a turn that has ended goes out, an observation comes back."""

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

SampleKey = tuple[int, int]
"""(prompt, index) of a sample."""


@dataclass(frozen=True)
class Turn:
    """A turn that has ended; an empty response asks for the beginning of the episode."""

    sample: SampleKey
    row: Mapping[str, Any]
    """The prompt's row of the dataset, with `prompt` (messages, or text) and `ground_truth`."""
    response: Sequence[int]
    """All response tokens so far."""
    given: Sequence[tuple[int, int]]
    """Given spans [start, end) of the response."""
    seed: int
    """Key of the sample's random numbers."""
    truncated: bool
    """Whether the longest response ended the turn, and no stop token."""
    room: int
    """Tokens that still fit into the response. An answer that goes on has fewer."""
    step: int = 0
    """Training step of the sample."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of an episode."""

    score: float | None
    """The environment's reward; None if it has none."""
    turns: int
    """Turns of the policy."""
    ended: str
    """The reason for the end: `answered` (the model called no tool), `finished` (the environment is over), `maxTurns`,
    `maxTokens`, `toolSeconds`, `episodeSeconds`, or `failed`."""
    tool_errors: Mapping[str, int] = field(default_factory=dict)
    """Failed tool calls by kind: `unparsed`, `unknown_tool`, `wrong_arguments`, `raised`."""
    seconds_away: float = 0.0
    """Seconds in which the sample waited for its environment."""
    restarted: int = 0
    """Times that the episode began anew."""
    dropped: bool = False
    """Whether no reward may score the sample."""


@dataclass(frozen=True)
class Observation:
    """An environment's answer to a turn."""

    sample: SampleKey
    tokens: Sequence[int] = ()
    """Given tokens to append to the response."""
    done: bool = False
    """Whether the episode is over: nothing is sampled after the tokens."""
    outcome: Outcome | None = None
    """The outcome of an episode that is over."""
    restarted: bool = False
    """Whether the episode began anew: the response so far is void, and the tokens are its new beginning."""


class Episodes(Protocol):
    """The environments of a share's samples."""

    def submit(self, turn: Turn) -> None:
        """Hand a turn over, without waiting. A turn may be handed over again in another process, after a kill."""

    def ready(self, wait_seconds: float) -> list[Observation]:
        """Return the answers that have come since the last call; wait for the first one no longer than this."""

    def close(self) -> None:
        """End all episodes and their processes."""


def gathered(answers: "queue.SimpleQueue[Observation | Exception]", wait_seconds: float) -> list[Observation]:
    """Return the observations that have come; wait so long for the first.

    Raises:
        Exception: the error that came instead of one.
    """
    found: list[Observation] = []
    try:
        answer = answers.get(timeout=wait_seconds) if wait_seconds > 0 else answers.get_nowait()
        while True:
            if isinstance(answer, Exception):
                raise answer
            found.append(answer)
            answer = answers.get_nowait()
    except queue.Empty:
        return found
