"""What generation asks of an engine: token ids in, token ids and log-probabilities out.

An engine holds one model at one weights version. `start` opens a run over a share; each `step` advances it by about one
token a running sequence. The caller owns the loop, so it may stop after any step and lose at most that step.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_functions.api import DecodeCounts, EngineRoom, FinishReason, WeightsReference
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, ModelSettings


class NonFiniteLogitsError(ArithmeticError):
    """The model gave NaN or infinite logits for a sequence: its weights have diverged, or its arithmetic overflowed.

    Args:
        prompt: row of the prompt.
        index: number of the sample in its group.
        position: number of the response token, from 0.
    """

    def __init__(self, prompt: int, index: int, position: int) -> None:
        super().__init__(f"non-finite logits for prompt {prompt}, sample {index}, response token {position}")
        self.prompt = prompt
        self.index = index
        self.position = position


@dataclass(frozen=True)
class SharedPrefix:
    """The beginning of a prompt that several instances need: one computes it, and the others may read its keys and
    values. An engine that cannot computes it itself."""

    tokens: int
    """Fewer than the prompt has."""
    folder: str
    """Of files that all of those instances reach."""
    source: bool
    """Whether it is this instance that computes it."""
    wait_seconds: float
    """Longest wait for another to have computed it."""


@dataclass(frozen=True)
class SequenceTask:
    """One response to generate, from its beginning or from where another engine left it."""

    prompt: int
    """Row of the prompt; tasks of one prompt share its tokens."""
    index: int
    """Number of the sample in its group."""
    prompt_tokens: Sequence[int]
    """At least one."""
    seed: int
    """64-bit key of the sample's own random numbers."""
    response_tokens: Sequence[int] = field(default=())
    """Tokens sampled before, at these weights or older ones; fewer than the longest response, and not ended."""
    log_probs: Sequence[float] = field(default=())
    """Their log-probabilities, under what sampled them."""
    prefix: SharedPrefix | None = None
    """What of the prompt other instances have too."""


@dataclass(frozen=True)
class SequenceResult:
    """A response, with the tokens that its task came with."""

    prompt: int
    index: int
    response_tokens: list[int]
    """The end-of-sequence token or the tokens of the stop string included."""
    log_probs: list[float]
    """Log-probability of each token under softmax(logits / temperature), computed in float32; at temperature 0, under
    softmax(logits)."""
    finish_reason: FinishReason
    """`cut` where the response is unfinished."""


@dataclass(frozen=True)
class ComputedTokens:
    """What a run has computed, in tokens."""

    prompt: int = 0
    """Those that were not held already."""
    response: int = 0
    """Those that were sampled, without those that the tasks came with."""
    passes: int = 0
    """Decode passes; 0 where the engine does not count them."""
    sequence_passes: int = 0
    """Sum over those passes of the sequences that took part: each got a token, or several that had been drafted."""

    def __add__(self, other: "ComputedTokens") -> "ComputedTokens":
        return ComputedTokens(
            self.prompt + other.prompt,
            self.response + other.response,
            self.passes + other.passes,
            self.sequence_passes + other.sequence_passes,
        )


class EngineRun(ABC):
    """A share being generated. Sequences are admitted in the order of the tasks.

    Args:
        tasks: in the order of admission.
        room: what fits into the engine; a share of a few sequences needs less.
    """

    def __init__(self, tasks: Sequence[SequenceTask], room: EngineRoom) -> None:
        self.room = room
        self._waiting = deque(tasks)
        self._computed = ComputedTokens()

    @property
    @abstractmethod
    def running(self) -> int:
        """Sequences in the batch."""

    @property
    def waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._waiting)

    @property
    def computed(self) -> ComputedTokens:
        """What has been computed so far."""
        return self._computed

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed so far."""
        return self.computed.prompt

    @property
    def response_tokens(self) -> int:
        """Response tokens sampled so far, without those that the tasks came with."""
        return self.computed.response

    @abstractmethod
    def step(self) -> list[SequenceResult]:
        """Advance every running sequence, and return those that have finished.

        Raises:
            NonFiniteLogitsError: if a sequence's distribution is not one.
            TaskError: `out_of_memory`.
        """

    @abstractmethod
    def lengths(self) -> list[tuple[int, int, int]]:
        """(prompt, index, response tokens) of the running sequences."""

    @abstractmethod
    def partials(self) -> list[SequenceResult]:
        """Every running sequence as it is now."""

    def unfinished(self) -> list[SequenceResult]:
        """Every unfinished sequence that has response tokens, running or waiting, as it is now."""
        waiting = [
            SequenceResult(task.prompt, task.index, list(task.response_tokens), list(task.log_probs), "cut")
            for task in self._waiting
        ]
        return [result for result in [*self.partials(), *waiting] if result.response_tokens]

    def decoding(self) -> DecodeCounts:
        """How the tokens came about, as far as the engine counts it."""
        computed = self.computed
        if not computed.passes:
            return DecodeCounts()
        return DecodeCounts(passes=computed.passes, sequence_passes=computed.sequence_passes, tokens=computed.response)

    def prefix_traffic(self) -> dict[str, float]:
        """What has been sent to and fetched from other instances of shared prefixes: `tokens_sent`, `bytes_sent`,
        `seconds_sent` and the same with `_fetched`, of all workers; empty where instances compute their own prompts."""
        return {}


class Engine(Protocol):
    """A model in memory that can generate."""

    def load(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Hold exactly these weights: swap weights in place, load a model, or do nothing if they are held already.

        Raises:
            TaskError: `artifact_missing` or `model_unloadable`; the engine then holds nothing.
        """

    def sleep(self) -> None:
        """Give the device's memory back. The run is abandoned; `load` comes before the next one, and what it loads is
        as it was.

        Raises:
            TaskError: `engine_lost`: the memory comes back with the end of the process alone.
        """

    def start(
        self,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        kv_budget_tokens: int | None,
        drafts: Sequence[str] | None = None,
    ) -> EngineRun:
        """Open a run. One run at a time; a run that is abandoned needs no closing.

        Args:
            tasks: the share, in the order of admission.
            sampling: temperature (0 takes the likeliest tokens), limits and stop strings.
            kv_budget_tokens: most tokens in the KV cache at a time; from the free memory if None.
            drafts: folders of responses of earlier steps, from which an engine that can drafts tokens, the most telling
                one last; None where nothing is to be drafted. Tokens do not depend on it.

        Raises:
            TaskError: `data_invalid` or `bad_request` for a sequence that is too long for the model or the budget.
        """


def check_prompt(task: SequenceTask) -> None:
    """Refuse a prompt that nothing can follow.

    Raises:
        TaskError: `data_invalid`, naming it.
    """
    if not task.prompt_tokens:
        raise TaskError("data_invalid", f"prompt {task.prompt} has no tokens; remove it from the data")


def check_room(longest: int, budget: int) -> None:
    """Refuse a share whose longest sequence the KV cache could not hold, even alone.

    Args:
        longest: tokens that it can have, prompt and response.
        budget: tokens that the cache has room for.

    Raises:
        TaskError: `bad_request`.
    """
    if longest > budget:
        raise TaskError(
            "bad_request",
            f"the longest sequence can have {longest} tokens (prompt and sampling.maxResponseTokens), but the KV"
            f" cache holds {budget}; raise generation.kvBudgetTokens, use an instance with more memory, or"
            " lower sampling.maxResponseTokens",
        )
