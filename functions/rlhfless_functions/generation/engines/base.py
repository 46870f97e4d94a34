"""The interface of a generation engine: token ids in, token ids and log-probabilities out.

An engine holds one model at one weights version. `start` opens a run over a share. Each `step` adds about one token to
every running sequence. The caller owns the loop: it may stop after any step, and loses at most that step.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlhfless_functions.api import DecodeCounts, EngineRoom, FinishReason, WeightsReference
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, ModelSettings


class NonFiniteLogitsError(ArithmeticError):
    """The model computed NaN or infinite logits for a sequence: its weights have diverged, or a number overflowed.

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
    """The beginning of a prompt that several instances need. One of them computes it, and the others may read its keys
    and values. An engine that can't read them computes the beginning itself."""

    tokens: int
    """Length of the beginning; less than that of the prompt."""
    folder: str
    """URI of the folder for the files, which all of these instances can reach."""
    source: bool
    """Whether this instance computes it."""
    wait_seconds: float
    """Longest wait in seconds for another instance to compute it."""


@dataclass(frozen=True)
class SequenceTask:
    """One response to generate, from its beginning or from where another engine stopped."""

    prompt: int
    """Row of the prompt; tasks of one prompt share its tokens."""
    index: int
    """Number of the sample in its group."""
    prompt_tokens: Sequence[int]
    """Tokens of the prompt, at least one."""
    seed: int
    """64-bit key of the sample's own random numbers."""
    response_tokens: Sequence[int] = field(default=())
    """Tokens sampled or given before, with these weights or older ones; fewer than the longest response, and
    unfinished."""
    log_probs: Sequence[float] = field(default=())
    """Log-probabilities of those tokens, under the weights that sampled them; 0 for given ones."""
    prefix: SharedPrefix | None = None
    """The part of the prompt that other instances need too, if any."""
    step: int = 1
    """The step for which it is sampled. An emulated GPU looks its length up by it."""

    @property
    def key(self) -> "SequenceKey":
        """Name of the sequence in its run."""
        return self.step, self.prompt, self.index


SequenceKey = tuple[int, int, int]
"""(step, prompt, index) of a sequence."""


@dataclass(frozen=True)
class Growth:
    """The most that a run may grow to, if sequences are added to it that were not among its first ones."""

    sequences: int
    """Most sequences at a time."""
    prompt_tokens: int
    """Tokens of the longest prompt."""
    prompts: frozenset[int] = frozenset()
    """Prompts of sequences that may be added, to draft tokens for."""


@dataclass(frozen=True)
class SequenceResult:
    """A response, including the tokens that its task began with."""

    prompt: int
    index: int
    response_tokens: list[int]
    """Response tokens, including the end-of-sequence token or the tokens of the stop string."""
    log_probs: list[float]
    """Log-probability of each token under softmax(logits / temperature), computed in float32; at temperature 0, under
    softmax(logits)."""
    finish_reason: FinishReason
    """`cut` if the response is unfinished."""
    step: int = 1
    """The step for which it is sampled."""

    @property
    def key(self) -> SequenceKey:
        """Name of the sequence in its run."""
        return self.step, self.prompt, self.index


@dataclass(frozen=True)
class ComputedTokens:
    """Counts of the tokens that a run has computed."""

    prompt: int = 0
    """Prompt tokens, except those whose keys and values were there before."""
    response: int = 0
    """Sampled response tokens, without the tasks' first tokens."""
    passes: int = 0
    """Decode passes; 0 if the engine does not count them."""
    sequence_passes: int = 0
    """Sum over these passes of the sequences in each. A pass gives each sequence one token, or several with drafts."""

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
        room: the room in the engine; a share of a few sequences needs less.
    """

    def __init__(self, tasks: Sequence[SequenceTask], room: EngineRoom) -> None:
        self.room = room
        self._waiting = deque(tasks)
        self._returned: set[SequenceKey] = set()
        self._expects_returns = False
        self._computed = ComputedTokens()

    @property
    @abstractmethod
    def running(self) -> int:
        """Sequences in the batch."""

    @property
    def waiting(self) -> int:
        """Sequences not yet admitted."""
        return len(self._waiting)

    def add(self, task: SequenceTask, *, returns: bool = False) -> None:
        """Append a sequence that is not in the run to those that wait for admission. It is one of the first ones, with
        any further tokens, or fits into the run's `Growth`.

        Args:
            returns: whether it was in the batch before, and goes ahead of those that never were: the engine may still
                have its keys and values.
        """
        if not returns:
            self._waiting.append(task)
            return
        self._returned.add(task.key)
        places = (place for place, other in enumerate(self._waiting) if other.key not in self._returned)
        self._waiting.insert(next(places, len(self._waiting)), task)

    def expect_returns(self) -> None:
        """Note that sequences that end may come back with more tokens. An engine may keep their keys and values."""
        self._expects_returns = True

    def remove(self, keys: Collection[SequenceKey]) -> None:
        """Take sequences out of the run, running or waiting. Their tokens are lost to it; `add` brings them back."""
        gone = set(keys)
        self._waiting = deque(task for task in self._waiting if task.key not in gone)
        self._remove_running(gone)

    @abstractmethod
    def _remove_running(self, keys: Collection[SequenceKey]) -> None:
        """Take running sequences out of the run."""

    @property
    def computed(self) -> ComputedTokens:
        """Counts of the tokens computed so far."""
        return self._computed

    def await_weights(self) -> None:  # noqa: B027 - most engines have them before a run
        """Wait until the weights are complete and checked. Meanwhile, compute what the weights that have arrived allow.
        The first step does the same.

        Raises:
            TaskError: the weights cannot be had.
        """

    @abstractmethod
    def step(self) -> list[SequenceResult]:
        """Advance every running sequence, and return those that have finished.

        Raises:
            NonFiniteLogitsError: if a sequence's logits are not a valid distribution.
            TaskError: `out_of_memory`.
        """

    @abstractmethod
    def lengths(self) -> list[tuple[int, int, int]]:
        """Return (prompt, index, response tokens) of the running sequences."""

    @abstractmethod
    def partials(self) -> list[SequenceResult]:
        """Return every running sequence as it is now."""

    def unfinished(self) -> list[SequenceResult]:
        """Return every unfinished sequence that has response tokens, running or waiting, as it is now."""
        waiting = [
            SequenceResult(task.prompt, task.index, list(task.response_tokens), list(task.log_probs), "cut", task.step)
            for task in self._waiting
        ]
        return [result for result in [*self.partials(), *waiting] if result.response_tokens]

    def decoding(self) -> DecodeCounts:
        """Return counts of how the tokens were generated, as far as the engine counts."""
        computed = self.computed
        if not computed.passes:
            return DecodeCounts()
        return DecodeCounts(passes=computed.passes, sequence_passes=computed.sequence_passes, tokens=computed.response)

    def prefix_traffic(self) -> dict[str, float]:
        """Return the amounts of shared prefixes that all workers have sent to other instances and fetched from them.

        The keys are `tokens_sent`, `bytes_sent`, `seconds_sent`, the same with `_fetched`, and `seconds_waited`, in
        which the run had nothing else to do. Empty if no prefixes are shared.
        """
        return {}

    def close(self) -> None:  # noqa: B027 - most engines have nothing to finish
        """Finish the work beside the steps. No step follows; `prefix_traffic` is then complete."""


class Engine(Protocol):
    """A model in memory that can generate."""

    def load(self, model: ModelSettings, weights: WeightsReference, prefetched: object | None = None) -> None:
        """Hold exactly these weights: replace weights in place, load a model, or do nothing if they are there already.

        An engine may go on loading a model after this; see `EngineRun.await_weights`.

        Args:
            model: the job's model.
            weights: the version.
            prefetched: result of `prefetch` for the version, if it was called.

        Raises:
            TaskError: `artifact_missing` or `model_unloadable`; the engine then holds nothing.
        """

    def prefetch(self, model: ModelSettings, weights: WeightsReference) -> object:
        """Bring weights as near as host memory, for a later `load`. It is called in another thread, while a run goes
        on, and changes nothing that the run reads.

        Raises:
            TaskError: if they cannot be had, or there is too little memory.
        """

    def sleep(self) -> None:
        """Release the device's memory and abandon the run. The caller calls `load` before the next run.

        Raises:
            TaskError: `engine_lost`: only the end of the process releases the memory.
        """

    def start(
        self,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        kv_budget_tokens: int | None,
        drafts: Sequence[str] | None = None,
        *,
        keep_kv_cache: bool = False,
        growth: Growth | None = None,
    ) -> EngineRun:
        """Open a run. There is one run at a time. An abandoned run needs no closing.

        Args:
            tasks: the share, in the order of admission.
            sampling: temperature (0 takes the likeliest tokens), limits and stop strings.
            kv_budget_tokens: most tokens in the KV cache at a time; from the free memory if None.
            drafts: folders with responses of earlier steps, the most useful one last. An engine that supports drafting
                drafts tokens from them; None turns drafting off. The sampled tokens do not depend on it.
            keep_kv_cache: whether a response that the run before left unfinished continues with its keys and values,
                even if older weights have computed them. No other response uses them. Any of them that are lost by
                other use of the engine, such as a run without this, are computed anew.
            growth: the most that the run may grow to; None if only the given tasks are ever in it.

        Raises:
            TaskError: `data_invalid` or `bad_request` for a sequence that is too long for the model or the budget.
        """


def to_draft_for(tasks: Sequence[SequenceTask], growth: Growth | None) -> tuple[set[int], int]:
    """Return the prompts that a run may draft for, and the number of its sequences as far as it is known."""
    prompts = {task.prompt for task in tasks}
    return (prompts, len(tasks)) if growth is None else (prompts | growth.prompts, max(len(tasks), growth.sequences))


def longest_prompt(tasks: Sequence[SequenceTask], growth: Growth | None) -> int:
    """Return the tokens of the longest prompt that a run may have."""
    lengths = [len(task.prompt_tokens) for task in tasks]
    return max([*lengths, growth.prompt_tokens] if growth is not None else lengths)


def check_prompt(task: SequenceTask) -> None:
    """Refuse an empty prompt, which no token can follow.

    Raises:
        TaskError: `data_invalid`, naming it.
    """
    if not task.prompt_tokens:
        raise TaskError("data_invalid", f"prompt {task.prompt} has no tokens; remove it from the data")


def check_room(longest: int, budget: int) -> None:
    """Refuse a share if its longest sequence alone would not fit into the KV cache.

    Args:
        longest: most tokens of a sequence, prompt and response.
        budget: tokens that fit into the cache.

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
