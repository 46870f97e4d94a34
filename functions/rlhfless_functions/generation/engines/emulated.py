"""An emulated GPU: responses have the lengths of a trace and the pace of a latency model, and nothing is computed.

It is for planning, rehearsal and tests of scheduling: the tokens mean nothing, and nothing can be learnt from them.
Like a real engine it batches continuously, and admits a sequence when its batch and its KV cache have room. While it
prefills, the other sequences wait. It decodes all sequences a token at a time, or as many as drafting gives on average.
It keeps the keys and values that it has computed at these weights while there is room, the newest ones longest: a
sequence that returns to it is not prefilled again.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from rlhfless_functions.api import DecodeCounts, EngineRoom, WeightsReference
from rlhfless_functions.data.traces import TraceLengths
from rlhfless_functions.data.turns import turns_of
from rlhfless_functions.environments.emulated import read_lengths
from rlhfless_functions.generation.engines.base import (
    ComputedTokens,
    EngineRun,
    Growth,
    SequenceKey,
    SequenceResult,
    SequenceTask,
    check_prompt,
    check_room,
    longest_prompt,
)
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, ModelSettings
from rlhfless_functions.settings.emulation import EmulationSettings

LEAST_PAUSE_SECONDS = 0.04
"""Seconds below which decode steps are made together. Dozens of instances can then share a core."""
EOS = 1
"""The token that ends a response."""
_FIRST_TOKEN, _TOKENS = 2, 62
_LOG_PROB = -math.log(_TOKENS)


class EmulatedEngine:
    """Holds a trace instead of a model; see `Engine`. A response has its length in the trace at the step of its task.

    Args:
        emulation: settings of the emulated GPU.
        listens_at: the clock's time at which the instance has started. Nothing is loaded before.
        clock: monotonic seconds.
        sleep: sleeps for so many seconds.
    """

    def __init__(
        self,
        emulation: EmulationSettings,
        listens_at: float = -math.inf,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._emulation = emulation
        self._listens_at = listens_at
        self._clock = clock
        self._sleep = sleep
        self._lengths: TraceLengths | None = None
        self._weights: WeightsReference | None = None
        self._cached: dict[SequenceKey, int] = {}
        self._cached_prompts: set[int] = set()
        self._run: EmulatedBatch | None = None
        self._changed = False
        """Whether all that is cached is of other weights."""

    def load(self, model: ModelSettings, weights: WeightsReference, prefetched: object | None = None) -> None:
        """Take the time of loading these weights, unless they are loaded.

        Raises:
            TaskError: `artifact_missing` or `data_invalid` for the trace.
        """
        if weights == self._weights:
            return
        started = max(self._clock(), self._listens_at)
        if self._lengths is None:
            self._lengths = read_lengths(self._emulation)
        self._weights, self._changed = weights, True
        until = started + self._emulation.weight_load_seconds * self._emulation.time_scale
        self._sleep(max(0.0, until - self._clock()))

    def prefetch(self, model: ModelSettings, weights: WeightsReference) -> None:
        """Return nothing: there are no weights to fetch."""

    def sleep(self) -> None:
        """Hold no weights, keys and values: the next load takes its time."""
        self._weights = self._run = None
        self._cached, self._cached_prompts = {}, set()

    def start(
        self,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        kv_budget_tokens: int | None,
        drafts: Sequence[str] | None = None,
        *,
        keep_kv_cache: bool = False,
        growth: Growth | None = None,
    ) -> "EmulatedBatch":
        """Open a run.

        With `keep_kv_cache` those that the run before left unfinished keep their keys and values through newer weights.
        With drafts of any earlier step, the number of drafted tokens is the one with the least time a token.

        Raises:
            TaskError: `bad_request` for a sequence that does not fit into the KV cache, `data_invalid` for an empty
                prompt or one that the trace does not have.
        """
        if self._lengths is None or self._weights is None:
            raise TaskError("model_unloadable", "no weights are loaded")
        budget = min(self._emulation.kv_tokens, kv_budget_tokens or self._emulation.kv_tokens)
        longest = longest_prompt(tasks, growth) + sampling.max_response_tokens
        check_room(longest, budget)
        forgets = self._changed or not self._emulation.prefix_cache
        if forgets:
            self._cached, self._cached_prompts = {}, set()
        if self._run is not None and (keep_kv_cache or not forgets):
            self._cached |= self._run.contexts()
        self._changed = False
        self._run = EmulatedBatch(
            self._emulation, tasks, self._lengths, sampling.max_response_tokens, budget,
            self._cached, self._cached_prompts, self._clock, self._sleep, drafts=bool(drafts), growth=growth,
        )  # fmt: skip
        return self._run


def _length(lengths: TraceLengths, task: SequenceTask, longest: int, *, acts: bool) -> int:
    """Return the length of a response, or that at the end of its turn if it acts: at least one token, and one more than
    it has already."""
    check_prompt(task)
    if task.prompt >= len(lengths.prompt_tokens):
        raise TaskError(
            "data_invalid",
            f"prompt {task.prompt} is not in the trace, which has {len(lengths.prompt_tokens)} prompts;"
            " let the rehearsal create its own data, or name a trace with all prompts",
        )
    response, there = lengths.response(task.step, task.prompt, task.index), len(task.response_tokens)
    ends = [end for _, end in turns_of(response)] if acts else [response.sampled]
    wanted = next((end for end in ends if end > there), there + 1)
    return min(longest, wanted)


class _Pace(NamedTuple):
    """A decode step with some number of drafts for each sequence, on average."""

    tokens: float
    """Tokens that each sequence gets."""
    rows: float
    """Rows that each sequence has for drafts."""


def _paces(emulation: EmulationSettings, longest_draft: int) -> list[_Pace]:
    """Return the steps with 0, 1, 2, … drafts."""
    coverage, tokens, chance = emulation.draft_coverage, 1.0, 1.0
    paces = [_Pace(1.0, 0.0)]
    for drafted in range(1, longest_draft + 1):
        chance *= emulation.draft_acceptance
        tokens += coverage * chance
        paces.append(_Pace(tokens, coverage * drafted))
    return paces


class EmulatedBatch(EngineRun):
    """A share being emulated; see `EngineRun`. It is ahead of the clock by at most a decode step.

    Args:
        trace: has the length of each whole response.
        longest: longest response.
        kv_tokens: capacity of the KV cache. A sequence waits while its context and those of the batch exceed it, unless
            it is alone. Growth beyond it after admission does not count.
        cached: tokens of the contexts that the engine holds already.
        cached_prompts: the prompts that it holds. The run adds those that it computes.
        drafts: whether there is anything to draft from.
        growth: the most that the run may grow to, if sequences are added to it.
    """

    def __init__(
        self,
        emulation: EmulationSettings,
        tasks: Sequence[SequenceTask],
        trace: TraceLengths,
        longest: int,
        kv_tokens: int,
        cached: dict[SequenceKey, int],
        cached_prompts: set[int],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
        *,
        drafts: bool = False,
        growth: Growth | None = None,
    ) -> None:
        longest_draft = emulation.longest_draft if emulation.draft_coverage * emulation.draft_acceptance > 0 else 0
        super().__init__(
            tasks,
            EngineRoom(
                sequences=emulation.max_batch,
                kv_tokens=kv_tokens,
                longest_draft=longest_draft,
            ),
        )
        self._emulation = emulation
        self._slots = min(emulation.max_batch, growth.sequences if growth is not None else emulation.max_batch)
        self._paces = _paces(emulation, longest_draft if drafts else 0)
        self._drafted = 0.0
        self._lengths = {task.key: _length(trace, task, longest, acts=emulation.acts) for task in tasks}
        self._trace = trace
        self._longest = longest
        self._kv_tokens = kv_tokens
        self._cached = cached
        self._cached_prompts = cached_prompts
        self._clock = clock
        self._sleep = sleep
        self._begun = clock()
        self._elapsed = 0.0
        self._steps = 0.0
        """Tokens that a sequence would have if it had been in the batch since the beginning."""
        self._context = 0.0
        self._admitted_at: dict[SequenceKey, float] = {}
        self._running: dict[SequenceKey, SequenceTask] = {}
        self._ends: list[tuple[float, SequenceKey]] = []

    def add(self, task: SequenceTask, *, returns: bool = False) -> None:
        """Append a sequence to those that wait for admission; see `EngineRun.add`."""
        self._lengths[task.key] = _length(self._trace, task, self._longest, acts=self._emulation.acts)
        super().add(task, returns=returns)

    def _remove_running(self, keys: Collection[SequenceKey]) -> None:
        for key in self._running.keys() & set(keys):
            task, tokens = self._running[key], self._tokens_of(self._running[key])
            self._cached[key] = len(task.prompt_tokens) + tokens
            self._context -= len(task.prompt_tokens) + len(task.response_tokens) + self._steps - self._admitted_at[key]
            self._computed += ComputedTokens(response=tokens - len(task.response_tokens))
            del self._running[key]
        self._ends = [each for each in self._ends if each[1] in self._running]
        heapq.heapify(self._ends)

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def computed(self) -> ComputedTokens:
        """Counts of the tokens computed so far."""
        made = sum(self._tokens_of(task) - len(task.response_tokens) for task in self._running.values())
        return self._computed + ComputedTokens(response=made)

    def decoding(self) -> DecodeCounts:
        """Return counts of how the tokens were generated, if tokens may be drafted: the averages of drafting."""
        counts = super().decoding()
        if not counts.passes:
            return counts
        emulation, drafted = self._emulation, round(self._drafted)
        accepted = min(counts.tokens - min(counts.tokens, counts.sequence_passes), drafted)
        looked_up = counts.sequence_passes if len(self._paces) > 1 else 0
        return counts.model_copy(
            update={
                "drafted": drafted,
                "accepted": accepted,
                "judged": min(drafted, round(accepted / emulation.draft_acceptance)),
                "looked_up": looked_up,
                "matched": round(emulation.draft_coverage * looked_up),
            }
        )

    def lengths(self) -> list[tuple[int, int, int]]:
        """Return (prompt, index, response tokens) of the running sequences."""
        return [(task.prompt, task.index, self._tokens_of(task)) for task in self._running.values()]

    def contexts(self) -> dict[SequenceKey, int]:
        """Return the number of tokens whose keys and values are held for each running sequence."""
        return {key: len(task.prompt_tokens) + self._tokens_of(task) for key, task in self._running.items()}

    def partials(self) -> list[SequenceResult]:
        """Return every running sequence as it is now."""
        return [self._result(task, self._tokens_of(task)) for task in self._running.values()]

    def step(self) -> list[SequenceResult]:
        """Decode until a sequence ends, or for one token, or for as many as take the least pause. Return when a real
        engine would have returned."""
        until = self._elapsed + LEAST_PAUSE_SECONDS / self._emulation.time_scale
        self._admit()
        finished: list[SequenceResult] = []
        while self._running and not finished:
            self._decode()
            finished = self._release()
            if self._elapsed >= until:
                break
        self._sleep(max(0.0, self._begun + self._elapsed * self._emulation.time_scale - self._clock()))
        return finished

    def _decode(self) -> None:
        emulation, batch = self._emulation, len(self._running)
        plain = emulation.step_seconds + batch * emulation.sequence_seconds + self._context * emulation.context_seconds
        row = batch * emulation.draft_seconds
        pace = min(self._paces, key=lambda each: (plain + row * each.rows) / each.tokens)
        self._elapsed += plain + row * pace.rows
        self._steps += pace.tokens
        self._context += batch * pace.tokens
        if self.room.longest_draft:
            self._drafted += batch * pace.rows
            self._computed += ComputedTokens(passes=1, sequence_passes=batch)

    def _release(self) -> list[SequenceResult]:
        results = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-9:
            _, key = heapq.heappop(self._ends)
            task = self._running[key]
            results.append(self._result(task, self._lengths[key]))
            del self._running[key]
            made = self._steps - self._admitted_at[key]
            self._context -= len(task.prompt_tokens) + len(task.response_tokens) + made
            self._computed += ComputedTokens(response=self._lengths[key] - len(task.response_tokens))
            # An environment may answer, and the sample go on.
            self._cached.pop(key, None)
            self._cached[key] = len(task.prompt_tokens) + self._lengths[key]
        return results

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            task = self._waiting[0]
            key = task.key
            context = len(task.prompt_tokens) + len(task.response_tokens)
            if self._running and self._context + context > self._kv_tokens:
                return
            self._waiting.popleft()
            held = len(task.prompt_tokens) if task.prompt in self._cached_prompts else 0
            held = max(held, min(context, self._cached.get(key, 0)))
            self._elapsed += self._emulation.prefill_token_seconds * (context - held)
            self._computed += ComputedTokens(prompt=max(0, len(task.prompt_tokens) - held))
            self._cached_prompts.add(task.prompt)
            self._running[key] = task
            self._admitted_at[key] = self._steps
            self._context += context
            self._cached.pop(key, None)
            self._make_room()
            heapq.heappush(self._ends, (self._steps + self._lengths[key] - len(task.response_tokens), key))

    def _make_room(self) -> None:
        """Forget the contexts that were kept longest, as far as the batch needs their room."""
        excess = self._context + sum(self._cached.values()) - self._kv_tokens
        for key in list(self._cached) if excess > 0 else ():
            excess -= self._cached.pop(key)
            if excess <= 0:
                return

    def _tokens_of(self, task: SequenceTask) -> int:
        """Return the number of response tokens of a running sequence."""
        return len(task.response_tokens) + int(self._steps - self._admitted_at[task.key] + 1e-9)

    def _result(self, task: SequenceTask, tokens: int) -> SequenceResult:
        length = self._lengths[task.key]
        before = len(task.response_tokens)
        response = [*task.response_tokens, *_tokens(task.seed, range(before, tokens))]
        if tokens < length:
            reason = "cut"
        elif length == self._longest:
            reason = "truncated"
        else:
            reason = "stop"
            response[-1] = EOS
        log_probs = [*task.log_probs, *[_LOG_PROB] * (tokens - before)]
        return SequenceResult(task.prompt, task.index, response, log_probs, reason, task.step)


def _tokens(seed: int, positions: Iterable[int]) -> list[int]:
    """Return tokens that depend on the sample and the position alone: those of SplitMix64, as in a real engine."""
    with np.errstate(over="ignore"):
        state = np.uint64(seed % 2**64) + (np.fromiter(positions, np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (_FIRST_TOKEN + (state ^ (state >> np.uint64(31))) % np.uint64(_TOKENS)).astype(int).tolist()
