"""The continuous batch: sequences join when there is room and leave when they end; one token a row at a time."""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from rlhfless_functions.api import EngineRoom, FinishReason
from rlhfless_functions.generation.engines.attention import Masks
from rlhfless_functions.generation.engines.base import (
    ComputedTokens,
    EngineRun,
    NonFiniteLogitsError,
    SequenceResult,
    SequenceTask,
)
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded
from rlhfless_functions.generation.engines.prefill import prefill
from rlhfless_functions.generation.engines.randomness import signed_keys, uniforms
from rlhfless_functions.generation.engines.sampling import draw
from rlhfless_functions.generation.engines.stop_strings import StopStrings
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling

CPU_ROWS = 16
"""Rows of a pass on a CPU are a multiple of this: from so many on, matrix kernels add up in one order."""
PREFILL_TOKENS = {"cpu": 2048, "cuda": 8192}
"""Most tokens prefilled and replayed between two decode steps, unless one sequence has more; a stop waits for them."""
REPLAY_ROWS = 256
"""Tokens of a continued response computed in one pass."""


def padded_rows(rows: int, device: torch.device) -> int:
    """Rows that a decode pass of so many sequences computes."""
    multiple = CPU_ROWS if device.type == "cpu" else 1
    return -(-rows // multiple) * multiple


class ContinuousBatch(EngineRun):
    """A run of the transformers engine; see `EngineRun`.

    A prompt but for its last token is prefilled once, and copied to the rows of its group. Its last token is then fed
    like any sampled one, so that every response token comes out of a decode pass. A continued response is replayed
    through the decode pass too, many tokens at once, each as a row of its own.

    On a CPU with one thread and in float32, a token and its log-probability are bitwise the same whatever else is in
    the batch and wherever the response was cut: prompts are prefilled with prompts of the same padded length alone,
    decode rows are padded to `CPU_ROWS`, and attention reads whole blocks. In bfloat16 and on a GPU they are the same
    up to the kernels' own rounding.

    Args:
        model: on its device, in evaluation mode.
        cache: at least one slot; long enough for every sequence.
        masks: of the model.
        tasks: in the order of admission.
        sampling: temperature and longest response.
        eos_token_ids: tokens that end a response.
        stop_strings: strings that end a response, if any.
        slots: most sequences of this share at a time.
        room: what the engine has room for.
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
    ) -> None:
        super().__init__(tasks, room)
        self._model = model
        self._cache = cache
        self._masks = masks
        self._sampling = sampling
        self._stop_strings = stop_strings
        self._slots = slots
        self._device = model.device
        self._dtype = model.dtype
        self._eos = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool, device=self._device)
        self._eos[list(eos_token_ids)] = True
        rows = padded_rows(slots, self._device)
        # Of each row, on the device. A row without a sequence has length 0 and is computed with the rest, if at all.
        self._inputs = self._vector(rows)
        self._lengths = self._vector(rows)
        self._generated = self._vector(rows)
        self._keys = self._vector(rows)
        self._active = self._vector(rows)
        self._tokens = torch.zeros(rows, sampling.max_response_tokens, dtype=torch.long, device=self._device)
        self._log_probs = torch.zeros(rows, sampling.max_response_tokens, device=self._device)
        # The same on the host, so that planning a step waits for nothing.
        self._tasks: list[SequenceTask | None] = [None] * rows
        self._host_active = np.zeros(rows, dtype=bool)
        self._host_lengths = np.zeros(rows, dtype=np.int64)
        self._host_generated = np.zeros(rows, dtype=np.int64)
        self._prompt_slots: dict[int, int] = {}

    @property
    def running(self) -> int:
        """Sequences in the batch."""
        return int(self._host_active.sum())

    def lengths(self) -> list[tuple[int, int, int]]:
        """(prompt, index, response tokens) of the running sequences."""
        return [(task.prompt, task.index, int(self._host_generated[slot])) for slot, task in self._running_tasks()]

    def partials(self) -> list[SequenceResult]:
        """Every running sequence as it is now."""
        return [self._result(slot, task, "cut") for slot, task in self._running_tasks()]

    @torch.inference_mode()
    def step(self) -> list[SequenceResult]:
        """Admit what fits, sample a token for every running sequence, and return those that have finished."""
        try:
            self._admit()
            self._compact()
            if not self._host_active.any():
                return []
            return self._decode()
        except torch.OutOfMemoryError as error:
            raise TaskError(
                "out_of_memory",
                f"the device has not enough memory for {self.running} sequences: set a smaller"
                f" generation.kvBudgetTokens or sampling.maxResponseTokens ({error})",
                retryable=True,
            ) from error

    # --- decoding ------------------------------------------------------------------------------------------------

    def _decode(self) -> list[SequenceResult]:
        rows = self._rows(int(np.flatnonzero(self._host_active)[-1]) + 1)
        window = padded(int(self._host_lengths[self._host_active].max()) + 1)
        lengths, generated = self._lengths[:rows], self._generated[:rows]
        self._cache.decode(lengths, window)
        logits = self._forward(self._inputs[:rows], lengths, window)
        tokens, log_probs, sound = draw(logits, self._sampling.temperature, uniforms(self._keys[:rows], generated))
        column = generated[:, None]
        self._tokens[:rows].scatter_(1, column, tokens[:, None])
        self._log_probs[:rows].scatter_(1, column, log_probs[:, None])
        self._inputs[:rows] = tokens
        active = self._active[:rows]
        lengths += active
        generated += active
        self._host_lengths += self._host_active
        self._host_generated += self._host_active
        self._computed += ComputedTokens(response=self.running)
        ended = self._ended(rows, tokens)
        # One transfer tells whether there is anything to do on the host.
        notable = (ended | (generated >= self._sampling.max_response_tokens) | ~sound) & active.bool()
        if not notable.any():
            return []
        slots = notable.nonzero()[:, 0].tolist()
        self._check_sound(sound, slots)
        natural = ended.tolist()
        return self._release(slots, ["stop" if natural[slot] else "truncated" for slot in slots])

    def _forward(self, inputs: torch.Tensor, positions: torch.Tensor, window: int) -> torch.Tensor:
        output = self._model(
            input_ids=inputs[:, None],
            attention_mask=self._masks.decode(positions, window, self._dtype),
            position_ids=positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, 0]
        return logits

    def _ended(self, rows: int, tokens: torch.Tensor) -> torch.Tensor:
        ended = self._eos[tokens]
        if self._stop_strings is None:
            return ended
        slots = np.flatnonzero(self._host_active).tolist()
        columns = self._generated[:rows, None] - torch.arange(self._stop_strings.window, 0, -1, device=self._device)
        newest = self._tokens[:rows].gather(1, columns.clamp(min=0)).tolist()
        ends = self._host_generated.tolist()
        tails = [newest[slot][-ends[slot] :] for slot in slots]
        found = [slot for slot, stops in zip(slots, self._stop_strings.ended(tails), strict=True) if stops]
        ended[found] = True
        return ended

    def _check_sound(self, sound: torch.Tensor, slots: list[int]) -> None:
        for slot in slots:
            task = self._tasks[slot]
            if task is not None and not sound[slot]:
                self._cache.reset()
                raise NonFiniteLogitsError(task.prompt, task.index, int(self._host_generated[slot]) - 1)

    def _release(self, slots: list[int], reasons: list[FinishReason]) -> list[SequenceResult]:
        results = []
        for slot, reason in zip(slots, reasons, strict=True):
            task = self._tasks[slot]
            assert task is not None
            results.append(self._result(slot, task, reason))
            self._tasks[slot] = None
        self._host_active[slots] = False
        self._host_lengths[slots] = 0
        self._host_generated[slots] = 0
        index = torch.tensor(slots, device=self._device)
        for vector in (self._active, self._lengths, self._generated):
            vector.index_fill_(0, index, 0)
        return results

    def _result(self, slot: int, task: SequenceTask, reason: FinishReason) -> SequenceResult:
        end = int(self._host_generated[slot])
        return SequenceResult(
            task.prompt, task.index, self._tokens[slot, :end].tolist(), self._log_probs[slot, :end].tolist(), reason
        )

    def _running_tasks(self) -> list[tuple[int, SequenceTask]]:
        return [(slot, task) for slot, task in enumerate(self._tasks) if task is not None]

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting sequences, in order, and bring their rows to where sampling goes on."""
        if not self._waiting:
            return
        free = [slot for slot in range(self._slots) if self._tasks[slot] is None]
        # Of the prompts that ran in the last step: rows that it released hold theirs until the next pass writes.
        known = self._prompt_slots
        admitted: dict[int, SequenceTask] = {}
        prefilled: set[int] = set()
        work = 0
        for slot in free:
            if not self._waiting:
                break
            task = self._waiting[0]
            work += len(task.response_tokens)
            if task.prompt not in known and task.prompt not in prefilled:
                work += padded(len(task.prompt_tokens))
            if admitted and work > PREFILL_TOKENS[self._device.type]:
                break
            prefilled.add(task.prompt)
            admitted[slot] = self._waiting.popleft()
        if admitted:
            self._copy({slot: (task, known[task.prompt]) for slot, task in admitted.items() if task.prompt in known})
            self._prefill({slot: task for slot, task in admitted.items() if task.prompt not in known})
            self._seat(admitted)
        self._prompt_slots = {task.prompt: slot for slot, task in self._running_tasks()}

    def _copy(self, admitted: dict[int, tuple[SequenceTask, int]]) -> None:
        """Take each prompt from a row that holds it. All are read before any row is overwritten."""
        if admitted:
            tokens = max(len(task.prompt_tokens) for task, _ in admitted.values())
            sources = [source for _, source in admitted.values()]
            self._cache.copy(self._index(sources), self._index(admitted), tokens)

    def _prefill(self, admitted: dict[int, SequenceTask]) -> None:
        """Compute each prompt once, and copy it to the rows of its group."""
        prompts = {task.prompt: task.prompt_tokens for task in admitted.values()}
        self._computed += ComputedTokens(prompt=sum(map(len, prompts.values())))
        for members, layers in prefill(self._model, self._masks, prompts):
            row_of = {prompt: row for row, prompt in enumerate(members)}
            rows = {slot: row_of[task.prompt] for slot, task in admitted.items() if task.prompt in row_of}
            self._cache.store(layers, self._index(rows.values()), self._index(rows))

    def _seat(self, admitted: dict[int, SequenceTask]) -> None:
        """Set the rows' state, and replay what was sampled before."""
        slots = list(admitted)
        tasks = list(admitted.values())
        for slot, task in admitted.items():
            self._tasks[slot] = task
            done = len(task.response_tokens)
            if done:
                self._tokens[slot, :done] = torch.tensor(task.response_tokens, device=self._device)
                self._log_probs[slot, :done] = torch.tensor(task.log_probs, device=self._device)
                self._replay(slot, task)
        generated = [len(task.response_tokens) for task in tasks]
        lengths = [len(task.prompt_tokens) - 1 + done for task, done in zip(tasks, generated, strict=True)]
        inputs = [(task.response_tokens or task.prompt_tokens)[-1] for task in tasks]
        self._host_active[slots] = True
        self._host_lengths[slots] = lengths
        self._host_generated[slots] = generated
        index = self._index(slots)
        self._active[index] = 1
        self._lengths[index] = self._index(lengths)
        self._generated[index] = self._index(generated)
        self._inputs[index] = self._index(inputs)
        self._keys[index] = self._index(signed_keys([task.seed for task in tasks]))

    def _replay(self, slot: int, task: SequenceTask) -> None:
        """Compute keys and values of the prompt's last token and of all response tokens but the last."""
        tokens = [task.prompt_tokens[-1], *task.response_tokens[:-1]]
        first = len(task.prompt_tokens) - 1
        for start in range(0, len(tokens), REPLAY_ROWS):
            chunk = tokens[start : start + REPLAY_ROWS]
            positions = list(range(first + start, first + start + len(chunk)))
            # Padding rows compute the last token again, and write the same.
            spare = max(0, self._rows(1) - len(chunk))
            rows = self._index([*positions, *[positions[-1]] * spare])
            window = padded(positions[-1] + 1)
            self._cache.replay(slot, rows, window)
            self._forward(self._index([*chunk, *[chunk[-1]] * spare]), rows, window)

    # --- rows ----------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Move the last rows into the holes, once the batch can then do with fewer."""
        if self._waiting:
            return
        occupied = np.flatnonzero(self._host_active)
        count = len(occupied)
        if count == 0 or self._rows(count) >= self._rows(int(occupied[-1]) + 1):
            return
        sources = occupied[occupied >= count]
        holes = np.flatnonzero(~self._host_active[:count])
        self._cache.copy(self._index(sources), self._index(holes), padded(int(self._host_lengths[sources].max())))
        source_index, hole_index = self._index(sources), self._index(holes)
        for tensor in (
            self._inputs, self._lengths, self._generated, self._keys, self._active, self._tokens, self._log_probs,
        ):  # fmt: skip
            tensor[hole_index] = tensor[source_index]
        for vector in (self._active, self._lengths, self._generated):
            vector.index_fill_(0, source_index, 0)
        for array in (self._host_active, self._host_lengths, self._host_generated):
            array[holes] = array[sources]
            array[sources] = 0
        for source, hole in zip(sources.tolist(), holes.tolist(), strict=True):
            self._tasks[hole], self._tasks[source] = self._tasks[source], None

    def _rows(self, rows: int) -> int:
        return padded_rows(rows, self._device)

    def _vector(self, rows: int) -> torch.Tensor:
        return torch.zeros(rows, dtype=torch.long, device=self._device)

    def _index(self, values: Collection[int] | np.ndarray) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.long, device=self._device)
