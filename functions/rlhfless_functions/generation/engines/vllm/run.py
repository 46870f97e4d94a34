"""A run of vLLM's engine over a share."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.api import DecodeCounts, EngineRoom, FinishReason
from rlhfless_functions.generation.engines.base import (
    ComputedTokens,
    EngineRun,
    Growth,
    NonFiniteLogitsError,
    SequenceKey,
    SequenceResult,
    SequenceTask,
)
from rlhfless_functions.generation.engines.randomness import shifted_key
from rlhfless_functions.generation.engines.stop_strings import StopStrings
from rlhfless_functions.generation.engines.vllm.drafting import DraftedRequests
from rlhfless_functions.generation.engines.vllm.draws import END, GREEDY, KEY
from rlhfless_functions.generation.engines.vllm.salts import KeptBlocks, RunSalts
from rlhfless_functions.generation.prefix_exchange import PrefixExchange
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "truncated"}


@dataclass
class _Running:
    """A running sequence of vLLM. Its tokens are read from vLLM's own record of the request only when needed, so a
    token costs nothing here."""

    task: SequenceTask
    name: str
    state: Any
    salt: str | None = None
    searched: int = 0
    """New tokens that have been searched for stop strings."""

    @property
    def new_tokens(self) -> list[int]:
        tokens: list[int] = self.state.detokenizer.output_token_ids
        return tokens

    @property
    def length(self) -> int:
        return len(self.task.response_tokens) + len(self.new_tokens)

    @property
    def computed(self) -> ComputedTokens:
        """The tokens computed for the sequence. Prompt tokens from the prefix cache do not count; tokens of a continued
        response, which vLLM takes as part of the prompt, do."""
        sampled = len(self.new_tokens)
        if not sampled:
            return ComputedTokens()
        given = len(self.task.prompt_tokens) + len(self.task.response_tokens)
        return ComputedTokens(given - int(self.state.num_cached_tokens), sampled)


class VllmRun(EngineRun):
    """A run of the vLLM engine; see `EngineRun`.

    Args:
        engine: vLLM's engine, with our sampler in it and no request.
        tasks: in the order of admission.
        sampling: temperature and longest response.
        end_tokens: tokens that end a response.
        stop_strings: strings that end a response, if any.
        room: most sequences and tokens in vLLM at a time.
        adapter: the requests' adapter, if any.
        shared_as: the weights of shared prefixes, if prefixes can be shared.
        drafted: proposes drafts; None turns drafting off.
        salts: salts of the blocks of the prefix cache that each task may use.
        growth: the most that the run may grow to, if sequences are added to it.
    """

    def __init__(
        self,
        engine: Any,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        end_tokens: Sequence[int],
        stop_strings: StopStrings | None,
        room: EngineRoom,
        adapter: Any = None,
        shared_as: str | None = None,
        drafted: DraftedRequests | None = None,
        salts: RunSalts | None = None,
        growth: Growth | None = None,
    ) -> None:
        super().__init__(tasks, room)
        self._engine = engine
        self._sampling = sampling
        self._end_tokens = list(end_tokens)
        self._stop_strings = stop_strings
        self._slots = min(room.sequences, growth.sequences if growth is not None else room.sequences)
        self._adapter = adapter
        self._shared_as = shared_as
        self._drafted = drafted
        self._salts = salts or RunSalts()
        self._kept = KeptBlocks()
        if drafted is not None:
            engine.collective_rpc("draft_for", args=(drafted,))
        self._running: dict[str, _Running] = {}
        self._exchange = self._open_exchange(tasks)
        self._traffic_before = self._traffic()

    @property
    def running(self) -> int:
        """Number of sequences in vLLM."""
        return len(self._running)

    @property
    def computed(self) -> ComputedTokens:
        """Counts of the tokens computed so far, with those of running sequences."""
        drafted = self._drafted
        passes = ComputedTokens() if drafted is None else ComputedTokens(0, 0, drafted.passes, drafted.sequence_passes)
        return sum((each.computed for each in self._running.values()), self._computed + passes)

    def decoding(self) -> DecodeCounts:
        """Return counts of how the tokens were generated. Passes are counted only if tokens are drafted."""
        for each in self._running.values():
            self._note_kept(each)
        drafted = self._drafted.drafter.counted() if self._drafted is not None else {}
        return super().decoding().model_copy(update=self._kept.counted() | drafted)

    def unfinished_salts(self) -> dict[int, str | None]:
        """Return the salt of each running sequence, by the sample's seed."""
        return {each.task.seed: each.salt for each in self._running.values()}

    def lengths(self) -> list[tuple[int, int, int]]:
        """Return (prompt, index, response tokens) of the running sequences."""
        return [(each.task.prompt, each.task.index, each.length) for each in self._running.values()]

    def prefix_traffic(self) -> dict[str, float]:
        """Return the amounts of shared prefixes that have been sent and fetched; see `EngineRun`."""
        return {name: value - self._traffic_before[name] for name, value in self._traffic().items()}

    def close(self) -> None:
        """Send the rest of the shared prefixes."""
        if self._exchange is not None:
            connector_of(self._engine).exchange = None
            self._exchange.close()

    def partials(self) -> list[SequenceResult]:
        """Return every running sequence as it is now."""
        return [_result(each, "cut") for each in self._running.values()]

    def unfinished(self) -> list[SequenceResult]:
        """Return every unfinished sequence that has response tokens from a valid distribution."""
        return [result for result in map(_sound, super().unfinished()) if result.response_tokens]

    def step(self) -> list[SequenceResult]:
        """Hand over the sequences that fit, sample a token for each that vLLM runs, and return the finished ones.

        Raises:
            NonFiniteLogitsError: if a sequence's logits are not a valid distribution.
            TaskError: `engine_lost`; tokens sampled before are still available.
        """
        try:
            while self._waiting and len(self._running) < self._slots:
                self._hand_over(self._waiting.popleft())
            outputs = self._engine.step()
        except Exception as error:
            raise TaskError(
                "engine_lost",
                f"vLLM failed with {len(self._running)} sequences ({type(error).__name__}: {error}); this instance"
                " ends, and another one continues; if it lacks memory, set a smaller generation.kvBudgetTokens",
                retryable=True,
            ) from error
        finished = [self._finish(output) for output in outputs if output.finished]
        if self._stop_strings is not None:
            finished += self._stopped(self._stop_strings)
        for result in finished:
            self._check(result)
        return finished

    def abort(self) -> None:
        """Take everything back from vLLM."""
        self._engine.abort_request([each.name for each in self._running.values()], internal=True)
        if self._drafted is not None:
            self._engine.collective_rpc("draft_for", args=(None,))
        self._running.clear()
        self._waiting.clear()
        self.close()

    def _remove_running(self, keys: Collection[SequenceKey]) -> None:
        found = [name for name in map(_name, keys) if name in self._running]
        if found:
            self._engine.abort_request([self._running[name].name for name in found], internal=True)
        for name in found:
            self._result(self._remove(name), "cut", None)

    def _hand_over(self, task: SequenceTask) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        key = _name(task.key)
        parameters = SamplingParams(
            # vLLM's own greedy sampling would skip our sampler, which returns the log-probabilities.
            temperature=self._sampling.temperature or 1.0,
            max_tokens=self._sampling.max_response_tokens - len(task.response_tokens),
            stop_token_ids=self._end_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={
                KEY: shifted_key(task.seed, len(task.prompt_tokens)),
                GREEDY: self._sampling.temperature == 0,
                END: self._end_tokens[0] if self._end_tokens else 0,
                **self._transfer(task),
            },
        )
        salt = self._salts.of(task)
        tokens = tokens_input([*task.prompt_tokens, *task.response_tokens], cache_salt=salt)
        name = self._engine.add_request(key, tokens, parameters, lora_request=self._adapter)
        self._running[key] = _Running(task, name, self._engine.output_processor.request_states[name], salt)
        if self._drafted is not None:
            self._drafted.add(name, task)

    def _traffic(self) -> dict[str, float]:
        if self._shared_as is None:
            return {}
        parts = self._engine.collective_rpc("prefix_traffic")
        if not parts[0]:
            return {}
        in_store = self._exchange.seconds() if self._exchange is not None else {}
        copied = {name: sum(part[name] for part in parts) + in_store.get(name, 0.0) for name in parts[0]}
        return {**copied, "seconds_waited": connector_of(self._engine).seconds_waited}

    def _open_exchange(self, tasks: Sequence[SequenceTask]) -> PrefixExchange | None:
        """Return the exchange that carries shared prefixes through a store; None if there are none, or they need no
        store."""
        folder = next((task.prefix.folder for task in tasks if task.prefix is not None), None)
        if self._shared_as is None or folder is None or artifacts.local_path(folder) is not None:
            return None
        exchange = connector_of(self._engine).exchange = PrefixExchange(folder)
        return exchange

    def _transfer(self, task: SequenceTask) -> dict[str, Any]:
        prefix = task.prefix
        if prefix is None or self._shared_as is None:
            return {}
        from rlhfless_functions.generation.engines.vllm.prefixes import request_parameters

        tokens = task.prompt_tokens[: min(prefix.tokens, len(task.prompt_tokens) - 1)]
        folder = artifacts.local_path(prefix.folder) if self._exchange is None else self._exchange.folder
        return {
            "kv_transfer_params": request_parameters(
                str(folder), self._shared_as, tokens, source=prefix.source, wait_seconds=prefix.wait_seconds
            )
        }

    def _finish(self, output: Any) -> SequenceResult:
        each = self._remove(output.request_id)
        reason = output.outputs[0].finish_reason
        if reason not in _REASONS:
            raise TaskError("engine_lost", f"vLLM ended a sequence with an unexpected reason: {reason}", retryable=True)
        length = None
        if self._stop_strings is not None:
            # vLLM does not check stop strings: a sequence that it ends may contain one, now or earlier.
            (length,) = self._stops(self._stop_strings, [each])
        return self._result(each, "stop" if length is not None else _REASONS[reason], length)

    def _stopped(self, strings: StopStrings) -> list[SequenceResult]:
        """Return the running sequences whose text now contains a stop string."""
        running = list(self._running.items())
        lengths = self._stops(strings, [each for _, each in running])
        found = [(key, length) for (key, _), length in zip(running, lengths, strict=True) if length is not None]
        self._engine.abort_request([self._running[key].name for key, _ in found], internal=True)
        return [self._result(self._remove(key), "stop", length) for key, length in found]

    def _stops(self, strings: StopStrings, sequences: Sequence[_Running]) -> list[int | None]:
        """Return for each sequence the number of new tokens up to the first one that completes a stop string; None if
        none does. Tokens that were searched before are skipped."""
        tails = [
            (place, length, _newest(each, strings.window, length))
            for place, each in enumerate(sequences)
            for length in range(each.searched + 1, len(each.new_tokens) + 1)
        ]
        first: list[int | None] = [None] * len(sequences)
        if not tails:
            return first
        for (place, length, _), stops in zip(tails, strings.ended([tail for _, _, tail in tails]), strict=True):
            if stops and first[place] is None:
                first[place] = length
        for each in sequences:
            each.searched = len(each.new_tokens)
        return first

    def _remove(self, key: str) -> _Running:
        each = self._running.pop(key)
        self._computed += each.computed
        self._note_kept(each)
        return each

    def _note_kept(self, each: _Running) -> None:
        if each.new_tokens and self._salts.keeps(each.task):
            self._kept.found(each.task, int(each.state.num_cached_tokens))

    def _result(self, each: _Running, reason: FinishReason, length: int | None) -> SequenceResult:
        result = _result(each, reason, length)
        if self._drafted is not None:
            self._drafted.finished(each.name, result.response_tokens)
        return result

    def _erase_blocks(self) -> None:
        """Overwrite all keys and values. Blocks are used again, and a mask does not hide NaN in them."""
        if not self._engine.reset_prefix_cache():
            problem = "vLLM could not empty its prefix cache, which may hold NaN; this instance ends"
            raise TaskError("engine_lost", problem, retryable=True)
        self._engine.collective_rpc("erase_blocks")

    def _check(self, result: SequenceResult) -> None:
        for position, log_prob in enumerate(result.log_probs):
            if not math.isfinite(log_prob):
                self.abort()
                self._erase_blocks()
                raise NonFiniteLogitsError(result.prompt, result.index, position)


def _newest(each: _Running, tokens: int, length: int) -> list[int]:
    """Return the last tokens of a response with this number of new tokens."""
    new = each.new_tokens[max(0, length - tokens) : length]
    old = each.task.response_tokens[-(tokens - len(new)) :] if len(new) < tokens else ()
    return [*old, *new]


def _name(key: SequenceKey) -> str:
    """Return the name of a sequence as vLLM's caller gives it."""
    return "/".join(map(str, key))


def connector_of(engine: Any) -> Any:
    """Return the part of the prefix connector that decides. vLLM's scheduler runs in this process."""
    return engine.engine_core.engine_core.scheduler.connector


def _result(each: _Running, reason: FinishReason, length: int | None = None) -> SequenceResult:
    """Return a response as it is, or cut to this number of new tokens."""
    record = each.state.logprobs_processor.logprobs
    return SequenceResult(
        each.task.prompt,
        each.task.index,
        [*each.task.response_tokens, *each.new_tokens[:length]],
        [*each.task.log_probs, *record.logprobs[:length]],
        reason,
        each.task.step,
    )


def _sound(result: SequenceResult) -> SequenceResult:
    """Drop tokens that were not sampled from a valid distribution."""
    end = next((i for i, log_prob in enumerate(result.log_probs) if not math.isfinite(log_prob)), None)
    if end is None:
        return result
    return replace(result, response_tokens=result.response_tokens[:end], log_probs=result.log_probs[:end])
