"""The continuous batch: sequences join when there is room and leave when they end. A pass computes one token a row."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from rlhfless_functions.api import DecodeCounts, EngineRoom, FinishReason
from rlhfless_functions.generation.drafting.drafter import Drafter, Drafts, PassTiming
from rlhfless_functions.generation.drafting.pass_rows import PassRows
from rlhfless_functions.generation.engines.admission import LeftRows, admit
from rlhfless_functions.generation.engines.attention import Masks, RowsBySlot, attending_by_slot
from rlhfless_functions.generation.engines.base import (
    ComputedTokens,
    EngineRun,
    NonFiniteLogitsError,
    SequenceKey,
    SequenceResult,
    SequenceTask,
)
from rlhfless_functions.generation.engines.batch_rows import BatchRows
from rlhfless_functions.generation.engines.kept_rows import HeldRow, KeptRows
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded
from rlhfless_functions.generation.engines.pass_graphs import GRAPH_TOKENS, PassGraphs, cuda_capture
from rlhfless_functions.generation.engines.passes import ModelPasses, index_of, padded_rows
from rlhfless_functions.generation.engines.randomness import uniforms
from rlhfless_functions.generation.engines.sampling import draw
from rlhfless_functions.generation.engines.stop_strings import StopStrings
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling
from rlhfless_functions.weights import ArrivingPolicy

PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Most tokens that are prefilled or computed again between two decode steps, unless one sequence has more. A stop waits
until they are computed."""


class ContinuousBatch(EngineRun):
    """A run of the transformers engine; see `EngineRun`.

    A prompt without its last token is prefilled once and copied to the rows of its group. The last token then goes
    through a decode pass like a sampled token, so every response token comes from a decode pass. The tokens of a
    continued response go through decode passes too, many at once, each as a row of its own.

    On a CPU with one thread and in float32, a token and its log-probability are the same bit for bit, with any other
    sequences in the batch and wherever the response was cut. To this end, prompts are prefilled only with prompts of
    the same padded length, decode rows are padded to `CPU_ROWS`, and attention reads whole blocks. In bfloat16 and on a
    GPU they are the same up to the kernels' own rounding.

    Args:
        model: on its device, in evaluation mode.
        cache: at least one slot; long enough for every sequence.
        masks: masks of the model.
        tasks: in the order of admission.
        sampling: temperature and longest response.
        eos_token_ids: tokens that end a response.
        stop_strings: strings that end a response, if any.
        slots: most sequences of this share at a time.
        room: the room in the engine.
        drafter: drafts tokens; None turns drafting off.
        most_rows: most rows of a pass with drafts.
        arriving: the model's weights, if they may still be on their way.
        kept: rows of the cache that already hold keys and values of some tasks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: SlotCache,
        masks: Masks,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        eos_token_ids: Collection[int],
        stop_strings: StopStrings | None,
        slots: int,
        room: EngineRoom,
        drafter: Drafter | None = None,
        most_rows: int = 0,
        arriving: ArrivingPolicy | None = None,
        kept: KeptRows | None = None,
    ) -> None:
        self._kept = kept or KeptRows()
        super().__init__([task for task in tasks if task not in self._kept], room)
        self._passes = ModelPasses(model, masks, cache, arriving)
        self._cache = cache
        self._sampling = sampling
        self._stop_strings = stop_strings
        self._slots = slots
        self._drafter = drafter
        self._most_rows = most_rows
        self._device = model.device
        self._eos = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool, device=self._device)
        self._eos[list(eos_token_ids)] = True
        self._state = BatchRows(padded_rows(slots, self._device), sampling.max_response_tokens, self._device)
        self._prompt_slots: dict[int, int] = {}
        self._graphs = PassGraphs(self._compute, cuda_capture()) if self._device.type == "cuda" else None
        self._left = LeftRows()
        self._intact = True
        if self._kept.tasks:
            self._state.seat(dict(self._kept.tasks))

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return int(self._state.host_active.sum())

    def lengths(self) -> list[tuple[int, int, int]]:
        """Return (prompt, index, response tokens) of the running sequences."""
        return [
            (task.prompt, task.index, int(self._state.host_generated[slot])) for slot, task in self._state.running()
        ]

    def partials(self) -> list[SequenceResult]:
        """Return every running sequence as it is now."""
        return [self._state.result(slot, "cut") for slot, _ in self._state.running()]

    def decoding(self) -> DecodeCounts:
        """Return counts of how the tokens were generated."""
        kept = {"kept_tokens": self._kept.tokens, "kept_responses": len(self._kept.tasks)}
        drafted = self._drafter.counted() if self._drafter is not None else {}
        return super().decoding().model_copy(update=kept | drafted)

    def close(self) -> None:
        """Give the memory of the graphs back."""
        self._graphs = None

    def _remove_running(self, keys: Collection[SequenceKey]) -> None:
        slots = [slot for slot, task in self._state.running() if task.key in keys]
        if not slots:
            return
        if self._drafter is not None:
            self._drafter.released(slots, [self._state.result(slot, "cut").response_tokens for slot in slots])
        self._state.clear(slots)

    def held_rows(self) -> list[HeldRow]:
        """Return the rows of the cache that hold unfinished responses; none if a step failed and may have mixed
        them."""
        if not self._intact:
            return []
        state = self._state
        return [HeldRow(slot, task, state.result(slot, "cut").response_tokens) for slot, task in state.running()]

    @torch.inference_mode()
    def await_weights(self) -> None:
        """Prefill the first prompts while the weights arrive, layer by layer; do nothing if they are there."""
        if not self._passes.awaits_weights:
            return
        with self._memory_told():
            self._admit()
            self._passes.settle()

    @torch.inference_mode()
    def step(self) -> list[SequenceResult]:
        """Admit the sequences that fit, sample a token for each running one, and return those that have finished."""
        with self._memory_told():
            self._admit()
            self._compact()
            if not self._state.host_active.any():
                return []
            return self._decode()

    @contextmanager
    def _memory_told(self) -> Iterator[None]:
        self._intact = False
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise TaskError(
                "out_of_memory",
                f"the device does not have enough memory for {self.running} sequences; set a smaller"
                f" generation.kvBudgetTokens or sampling.maxResponseTokens ({error})",
                retryable=True,
            ) from error
        self._intact = True

    # --- decoding ------------------------------------------------------------------------------------------------

    def _decode(self) -> list[SequenceResult]:
        state = self._state
        active = np.flatnonzero(state.host_active)
        drafter = self._drafter if self._drafter is not None and self._drafter.on(len(active)) else None
        drafts = self._propose(drafter, active) if drafter is not None else None
        began = time.perf_counter()
        rows = plain_rows = self._rows(int(active[-1]) + 1)
        verified = None
        if drafts is not None:
            layout = PassRows.of(int(active[-1]) + 1, drafts, self._rows)
            verified = self._verify(active, layout, drafts)
        if verified is not None:
            rows = len(layout.slots)
            counts, tokens, reasons = verified
        else:
            counts = np.ones(len(active), dtype=np.int64)
            reasons = self._sample(rows)
            tokens = state.inputs[:rows].cpu().numpy()[active] if drafter is not None else counts
        state.host_lengths[active] += counts
        state.host_generated[active] += counts
        self._computed += ComputedTokens(response=int(counts.sum()), sequence_passes=len(active), passes=1)
        if drafter is not None:
            timing = PassTiming(time.perf_counter() - began, rows, plain_rows, int(active[-1]) + 1)
            drafter.sampled(active, counts, tokens, drafts, timing)
        return self._release(reasons) if reasons else []

    def _propose(self, drafter: Drafter, active: np.ndarray) -> Drafts | None:
        state = self._state

        def tokens_of(slot: int) -> tuple[int, Sequence[int], Sequence[int]]:
            task = state.task(slot)
            return task.prompt, task.prompt_tokens, state.tokens[slot, : int(state.host_generated[slot])].tolist()

        remaining = self._sampling.max_response_tokens - state.host_generated[active]
        return drafter.propose(active, remaining, tokens_of, int(active[-1]) + 1, self._rows, self._most_rows)

    def _sample(self, rows: int) -> dict[int, FinishReason]:
        """Sample a token for each row. Return the rows that have ended, and the reasons."""
        state = self._state
        longest = int(state.host_lengths[state.host_active].max()) + 1
        window = padded(longest) if self._graphs is None else min(padded(longest, GRAPH_TOKENS), self._cache.capacity)
        tokens, sound = (self._graphs or self._compute)(rows, window)
        ended = self._ended(rows, tokens)
        # One transfer tells whether there is anything to do on the host.
        over = state.generated[:rows] >= self._sampling.max_response_tokens
        notable = (ended | over | ~sound) & state.active[:rows].bool()
        if not notable.any():
            return {}
        slots = notable.nonzero()[:, 0].tolist()
        for slot in slots:
            if not sound[slot]:
                self._raise_unsound(slot, int(state.host_generated[slot]))
        natural = ended.tolist()
        return {slot: "stop" if natural[slot] else "truncated" for slot in slots}

    def _compute(self, rows: int, window: int) -> tuple[torch.Tensor, ...]:
        """Sample a token for each row, on the device alone. Return the tokens, and which rows are valid
        distributions."""
        state = self._state
        lengths, generated = state.lengths[:rows], state.generated[:rows]
        self._cache.decode(lengths, window)
        logits = self._passes.forward(state.inputs[:rows], lengths, window)
        tokens, log_probs, sound = draw(logits, self._sampling.temperature, uniforms(state.keys[:rows], generated))
        column = generated[:, None]
        state.tokens[:rows].scatter_(1, column, tokens[:, None])
        state.log_probs[:rows].scatter_(1, column, log_probs[:, None])
        state.inputs[:rows] = tokens
        lengths += state.active[:rows]
        generated += state.active[:rows]
        return tokens, sound

    def _verify(
        self, active: np.ndarray, layout: PassRows, drafts: Drafts
    ) -> tuple[np.ndarray, np.ndarray, dict[int, FinishReason]] | None:
        """Sample a token after each sequence's newest token and after each draft, and keep those after correct drafts.

        Returns how many tokens each active row got, the tokens, and which rows have ended. If a row is not a valid
        distribution, it removes every trace of the drafts and returns None."""
        state = self._state
        slots = self._index(layout.slots)
        positions = state.host_lengths[layout.slots] + layout.offsets
        columns = state.host_generated[layout.slots] + layout.offsets
        inputs = state.inputs[slots]
        inputs[layout.used :] = self._index(layout.drafted(drafts.tokens))
        window = padded(int(positions.max()) + 1)
        if layout.used == 1:
            self._cache.replay(0, self._index(positions), window)
            logits = self._passes.forward(inputs, self._index(positions), window)
        else:
            self._cache.verify(slots, self._index(positions), window)
            with attending_by_slot(RowsBySlot(slots, layout.used, layout.runs)):
                logits = self._passes.forward(inputs, self._index(positions), window)
        noise = uniforms(state.keys[slots], self._index(columns))
        tokens, log_probs, sound = draw(logits, self._sampling.temperature, noise)
        drafted = np.arange(layout.used, layout.used + len(drafts.tokens))
        if not sound[self._index(np.concatenate([active, drafted]))].all():
            # A draft may have caused the NaN. NaN keys would stay, and reach earlier rows in spite of the mask.
            self._cache.erase(slots[self._index(drafted)], self._index(positions[drafted]))
            return None
        drawn = tokens.cpu().numpy()
        ends = self._eos[tokens].cpu().numpy()
        counts = layout.kept(active, drafts, drawn, ends)
        reasons: dict[int, FinishReason] = {}
        if self._stop_strings is not None:
            sampled = drawn[layout.rows_of(active, counts, drafts)]
            reasons |= self._cut_at_stop_strings(active, counts, sampled)
        rows = layout.rows_of(active, counts, drafts)
        last = rows[np.cumsum(counts) - 1]
        for slot, count, row in zip(active.tolist(), counts.tolist(), last.tolist(), strict=True):
            if ends[row]:
                reasons[slot] = "stop"
            elif slot not in reasons and int(state.host_generated[slot]) + count >= self._sampling.max_response_tokens:
                reasons[slot] = "truncated"
        at = self._index(rows)
        state.tokens[slots[at], self._index(columns[rows])] = tokens[at]
        state.log_probs[slots[at], self._index(columns[rows])] = log_probs[at]
        grown = self._index(active)
        state.inputs[grown] = tokens[self._index(last)]
        state.lengths[grown] += self._index(counts)
        state.generated[grown] += self._index(counts)
        return counts, drawn[rows], reasons

    def _ended(self, rows: int, tokens: torch.Tensor) -> torch.Tensor:
        state = self._state
        ended = self._eos[tokens]
        if self._stop_strings is None:
            return ended
        slots = np.flatnonzero(state.host_active).tolist()
        columns = state.generated[:rows, None] - torch.arange(self._stop_strings.window, 0, -1, device=self._device)
        newest = state.tokens[:rows].gather(1, columns.clamp(min=0)).tolist()
        ends = (state.host_generated + 1).tolist()
        tails = [newest[slot][-ends[slot] :] for slot in slots]
        found = [slot for slot, stops in zip(slots, self._stop_strings.ended(tails), strict=True) if stops]
        ended[found] = True
        return ended

    def _cut_at_stop_strings(
        self, active: np.ndarray, counts: np.ndarray, sampled: np.ndarray
    ) -> dict[int, FinishReason]:
        """End responses at the first token that completes a stop string; returns these responses."""
        state = self._state
        assert self._stop_strings is not None
        window, ends = self._stop_strings.window, state.host_generated.tolist()
        before = [state.tokens[slot, max(0, ends[slot] - window) : ends[slot]].tolist() for slot in active.tolist()]
        tokens = [each.tolist() for each in np.split(sampled, np.cumsum(counts)[:-1])]
        found = self._stop_strings.first_ends(before, tokens)
        cut = np.array([end is not None for end in found])
        counts[cut] = [end for end in found if end is not None]
        return dict.fromkeys(active[cut].tolist(), "stop")

    def _raise_unsound(self, slot: int, position: int) -> None:
        task = self._state.task(slot)
        self._cache.reset()
        raise NonFiniteLogitsError(task.prompt, task.index, position)

    def _release(self, reasons: dict[int, FinishReason]) -> list[SequenceResult]:
        slots, results = list(reasons), [self._state.result(slot, reason) for slot, reason in reasons.items()]
        if self._drafter is not None:
            self._drafter.released(slots, [result.response_tokens for result in results])
        stay = self._expects_returns & (self._state.host_lengths[slots] < self._cache.capacity)
        for slot, result, stays in zip(slots, results, stay, strict=True):
            if stays:
                self._left.leave(HeldRow(slot, self._state.task(slot), result.response_tokens))
        self._state.leave(np.array(slots)[stay].tolist())
        self._state.clear(np.array(slots)[~stay].tolist())
        return results

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting sequences, in order, and prepare their rows for the next sampled token."""
        if not self._waiting:
            # Passes write over released rows before a sequence is added again.
            self._prompt_slots = {}
            return
        # Prompts of the last step: the rows that it released hold them until the next pass writes.
        known = self._prompt_slots or self._running_prompts()
        empty = (slot for slot in range(self._slots) if self._state.tasks[slot] is None)
        admitted = admit(self._waiting, empty, self._left, known, PREFILL_TOKENS[self._device.type])
        if admitted.tasks:
            copied = {slot: task for slot, task in admitted.fresh.items() if task.prompt in known}
            self._passes.copy({slot: (task, known[task.prompt]) for slot, task in copied.items()})
            new = {slot: task for slot, task in admitted.fresh.items() if slot not in copied}
            self._computed += ComputedTokens(prompt=self._passes.prefill(new))
            self._state.seat(admitted.tasks)
            self._passes.replay(admitted.continued)
        self._prompt_slots = self._running_prompts()

    def _running_prompts(self) -> dict[int, int]:
        """Return a row of each prompt that has a sequence, except for rows of older weights."""
        return {task.prompt: slot for slot, task in self._state.running() if task not in self._kept}

    # --- rows ----------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Move the last rows into free ones, if the batch then needs fewer rows."""
        state = self._state
        if self._waiting:
            return
        occupied = np.flatnonzero(state.host_active)
        count = len(occupied)
        if count == 0 or self._rows(count) >= self._rows(int(occupied[-1]) + 1):
            return
        sources = occupied[occupied >= count]
        holes = np.flatnonzero(~state.host_active[:count])
        swapped = self._left.swap(dict(zip(holes.tolist(), sources.tolist(), strict=True)))
        lengths = {source: int(state.host_lengths[hole]) for hole, source in swapped.items()}
        window = padded(max([int(state.host_lengths[sources].max()), *lengths.values()]))
        self._cache.copy(self._index([*sources, *swapped]), self._index([*holes, *swapped.values()]), window)
        state.move(sources, holes)
        state.set_lengths(lengths)
        self._prompt_slots = {}
        if self._drafter is not None:
            self._drafter.moved(sources, holes)

    def _rows(self, rows: int) -> int:
        return padded_rows(rows, self._device)

    def _index(self, values: Collection[int] | np.ndarray) -> torch.Tensor:
        return index_of(self._device, values)
