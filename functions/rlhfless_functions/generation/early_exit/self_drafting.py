"""A model that drafts for itself: all layers verify the tokens that its first layers guess (LayerSkip, arXiv
2404.16710).

Verification draws tokens in our way, so the samples stay the same. It decodes one sequence at a time, as at the end of
a step's longest response. No engine uses it: it measures what an engine would gain.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rlhfless_functions.generation.early_exit.draft_speed import DRAFTS, Choice, PassTimes
from rlhfless_functions.generation.early_exit.layers import ExitLayers
from rlhfless_functions.generation.engines.attention import Masks, use_grouped_attention
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded
from rlhfless_functions.generation.engines.passes import ModelPasses, padded_rows
from rlhfless_functions.generation.engines.randomness import signed_keys, uniforms
from rlhfless_functions.generation.engines.sampling import draw

MOST_ROWS = max(DRAFTS) + 1
"""Most rows of a pass of the whole model."""
_TIMED_LAYERS = 5
_TIMED_ROWS = (1, 4, MOST_ROWS)
_LEAST_REPEATS, _MOST_REPEATS = 3, 40
_TIMED_SECONDS = 0.5
"""Seconds for which a pass is timed again after the least repeats."""


@dataclass(frozen=True)
class Exit:
    """The way to draft."""

    layer: int
    """Layers that a draft passes."""
    drafts: int
    """Most tokens that a cycle drafts."""
    choice: Choice
    """`drawn`: a draft is drawn with the token's own random number. `likeliest`: it is the read-out's likeliest
    token."""


@dataclass(frozen=True)
class Decoded:
    """A decoded response."""

    tokens: list[int]
    log_probs: list[float]
    passes: int
    """Passes of the whole model."""
    seconds: float
    """Seconds without the prompt's pass."""


class SelfDrafting:
    """Decodes single sequences, with drafts and without; the model then attends as in the transformers engine.

    On a CPU in float32 with one thread, tokens and log-probabilities are those of the transformers engine, bit for bit.

    Args:
        exits: layers of a model on its device.
        temperature: 0 takes the likeliest token each time.
        longest: most tokens of a response.

    Raises:
        TaskError: `model_unloadable` for a model that the transformers engine cannot generate with.
    """

    def __init__(self, exits: ExitLayers, temperature: float, longest: int) -> None:
        use_grouped_attention(exits.model)
        self._exits = exits
        self._masks = Masks(exits.model.config.get_text_config())
        self._temperature = temperature
        self._longest = longest
        self._device = exits.model.device
        self._cache = SlotCache(1, 0)

    @torch.inference_mode()
    def decode(self, task: SequenceTask, length: int, exit_: Exit | None = None) -> Decoded:
        """Decode a response up to a length.

        Args:
            task: the prompt, and the key of the random numbers.
            length: number of its tokens; at most the longest.
            exit_: how to draft; by default one token per pass.
        """
        self._aim(len(task.prompt_tokens) + self._longest)
        self._whole.prefill({0: task})
        first = len(task.prompt_tokens) - 1
        (key,) = signed_keys([task.seed])
        known = [task.prompt_tokens[-1]]
        log_probs: list[float] = []
        passes, began = 0, self.now()
        while len(log_probs) < length:
            column = len(log_probs)
            tried = [known[-1]]
            if exit_ is not None:
                for number in range(min(exit_.drafts, self._longest - column - 1)):
                    place = column + number
                    tried.append(self._draft(exit_.layer, exit_.choice, tried[-1], first + place, key, place))
            tokens, probabilities = self._verify(tried, first + column, key, column)
            right = 0
            while right + 1 < len(tried) and tokens[right] == tried[right + 1]:
                right += 1
            known += tokens[: right + 1]
            log_probs += probabilities[: right + 1]
            passes += 1
        return Decoded(known[1 : length + 1], log_probs[:length], passes, self.now() - began)

    @torch.inference_mode()
    def times(self, context: int) -> PassTimes:
        """Measure the parts of a cycle.

        Args:
            context: number of tokens before the decoded one.
        """
        self._aim(context + MOST_ROWS)
        last = self._exits.count - 1
        layers = sorted({1 + (last - 1) * part // (_TIMED_LAYERS - 1) for part in range(_TIMED_LAYERS)}) if last else []
        calls: dict[tuple[str, int], Callable[[], object]] = {
            ("passes", rows): lambda rows=rows: self._verify([0] * rows, context, 0, 0) for rows in _TIMED_ROWS
        } | {
            ("drafts", layer): lambda layer=layer: self._draft(layer, "drawn", 0, context, 0, 0) for layer in layers
        }  # fmt: skip
        medians = self._medians(calls)
        return PassTimes(
            drafts={at: seconds for (kind, at), seconds in medians.items() if kind == "drafts"},
            passes={at: seconds for (kind, at), seconds in medians.items() if kind == "passes"},
        )

    def now(self) -> float:
        """Return seconds: the process's own time on a CPU, which other processes do not disturb, and the clock's
        elsewhere."""
        if self._device.type == "cpu":
            return time.process_time()
        torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _medians(self, calls: dict[tuple[str, int], Callable[[], object]]) -> dict[tuple[str, int], float]:
        """Return the median seconds of each call. The calls are interleaved, so a slow phase of the machine affects all
        of them."""
        seconds: dict[tuple[str, int], list[float]] = {name: [] for name in calls}
        began = self.now()
        for repeat in range(_MOST_REPEATS + 1):
            if repeat > _LEAST_REPEATS and self.now() - began > _TIMED_SECONDS * len(calls):
                break
            for name, call in calls.items():
                start = self.now()
                call()
                seconds[name].append(self.now() - start)
        # The first call of each warms up.
        return {name: statistics.median(each[1:]) for name, each in seconds.items()}

    def _aim(self, tokens: int) -> None:
        """Make sure that a cache has room for a sequence of so many tokens."""
        if tokens > self._cache.capacity:
            self._cache = SlotCache(1, padded(tokens))
            self._whole = ModelPasses(self._exits.model, self._masks, self._cache)
            self._shorter: dict[int, ModelPasses] = {}

    def _draft(self, layer: int, choice: Choice, token: int, position: int, key: int, column: int) -> int:
        """Guess the token that follows this one, in a pass of a single row."""
        if layer not in self._shorter:
            self._shorter[layer] = ModelPasses(self._exits.until(layer), self._masks, self._cache)
        window = padded(position + 1)
        positions = self._index([position])
        self._cache.decode(positions, window)
        logits = self._shorter[layer].forward(self._index([token]), positions, window)
        if choice == "likeliest":
            return int(logits[0].argmax())
        return int(draw(logits, self._temperature, uniforms(self._index([key]), self._index([column])))[0])

    def _verify(self, tried: Sequence[int], position: int, key: int, column: int) -> tuple[list[int], list[float]]:
        """Return the whole model's token after each of these, and its log-probability. Keys and values are overwritten
        by the whole model's."""
        spare = padded_rows(len(tried), self._device) - len(tried)
        # Padding rows compute the last token again, and write the same.
        offsets = [*range(len(tried)), *[len(tried) - 1] * spare]
        positions = self._index([position + offset for offset in offsets])
        window = padded(position + len(tried))
        self._cache.replay(0, positions, window)
        logits = self._whole.forward(self._index([tried[offset] for offset in offsets]), positions, window)
        logits = logits[: len(tried)]
        columns = self._index([column + offset for offset in offsets[: len(tried)]])
        tokens, log_probs, _ = draw(logits, self._temperature, uniforms(self._index([key]).expand_as(columns), columns))
        return tokens.tolist(), log_probs.tolist()

    def _index(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self._device)
