"""The engine on plain transformers models: any decoder with scaled dot-product attention, on a CPU or a GPU."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhfless_functions import weights as stored
from rlhfless_functions.api import EngineRoom, WeightsReference
from rlhfless_functions.generation.drafting.drafter import LONGEST_DRAFT, Drafter, DraftExperience
from rlhfless_functions.generation.drafting.history import HistoryCache, HistoryLoader
from rlhfless_functions.generation.drafting.index import MATCH
from rlhfless_functions.generation.engines.attention import Masks, use_grouped_attention
from rlhfless_functions.generation.engines.base import (
    Growth,
    SequenceTask,
    check_prompt,
    check_room,
    longest_prompt,
    to_draft_for,
)
from rlhfless_functions.generation.engines.continuous_batch import ContinuousBatch
from rlhfless_functions.generation.engines.kept_rows import KeptRows, keep_rows
from rlhfless_functions.generation.engines.kv_cache import SlotCache, padded
from rlhfless_functions.generation.engines.memory import free_kv_tokens
from rlhfless_functions.generation.engines.passes import padded_rows
from rlhfless_functions.generation.engines.stop_strings import StopStrings
from rlhfless_functions.generation.engines.trial import check_engine
from rlhfless_functions.runtime.device_memory import empty, give_back
from rlhfless_functions.runtime.host_memory import free_host_bytes
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, ModelSettings

logger = logging.getLogger(__name__)

MAX_LOGITS = {"cpu": 2**26, "cuda": 2**28}
"""Most numbers in the logits of one step. With a large vocabulary, logits take more memory than keys and values."""
MAX_ROWS = 1024
MIN_ROWS = 16


@dataclass
class _Loaded:
    settings: ModelSettings
    weights: WeightsReference
    policy: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    masks: Masks
    arriving: stored.ArrivingPolicy | None = None
    """The weights on their way, if the model was loaded before all of them had arrived."""


class TransformersEngine:
    """Holds one model, its tokenizer, and the memory of the KV cache between runs; see `Engine`.

    All versions of a model have the same tokenizer, which stays in memory during a sleep.
    """

    def __init__(self) -> None:
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: _Loaded | None = None
        self._cache: SlotCache | None = None
        self._run: ContinuousBatch | None = None
        """The run that wrote into the cache last, if its rows may be kept."""
        self._tokenizer: tuple[ModelSettings, PreTrainedTokenizerBase] | None = None
        self._experience = DraftExperience(self._device.type)
        self._history = HistoryCache()

    def load(self, model: ModelSettings, weights: WeightsReference, prefetched: object | None = None) -> None:
        """Hold exactly these weights: swap them in if the model is the same, load it otherwise.

        A loaded model may still get its weights afterwards, while the first prompts are computed.

        Raises:
            TaskError: `artifact_missing` or `model_unloadable`; the engine then holds nothing.
        """
        # Count as empty until everything is loaded: a failure must not leave a mixture of weights.
        held, self._loaded = self._loaded, None
        if held is not None and not _can_take(held, model, weights):
            self._drop(held)
            held = None
        if held is not None and held.weights != weights and isinstance(prefetched, stored.PrefetchedWeights):
            held = _take_over(held, weights, prefetched)
        if held is None:
            self._cache = self._run = None
            held = self._load(model, weights)
            self._experience = DraftExperience(self._device.type)
        elif held.weights != weights:
            stored.swap_policy(held.policy, weights)
            held.weights = weights
        self._loaded = held

    def prefetch(self, model: ModelSettings, weights: WeightsReference) -> stored.PrefetchedWeights:
        """Read weights into host memory, in the model's number format, for a later `load`.

        As much memory as they take must stay free beside them.

        Raises:
            TaskError: if they cannot be had or do not fit the model, or there is too little memory.
        """
        held = self._loaded
        if held is None or not _takes(held, model, weights):
            raise TaskError("model_unloadable", "another model is loaded")
        size = stored.swappable_bytes(held.policy)
        if (free := free_host_bytes()) < 2 * size:
            raise TaskError("out_of_memory", f"they take {size} bytes, and {free:.0f} bytes of host memory are free")
        return stored.prefetch_policy(held.policy, weights)

    def _load(self, model: ModelSettings, weights: WeightsReference) -> _Loaded:
        arriving = stored.load_arriving(model, weights, self._device)
        try:
            policy = arriving.policy if arriving is not None else stored.load_policy(model, weights)
            use_grouped_attention(_backbone(policy))
            masks = Masks(policy.config.get_text_config())
            if self._tokenizer is None or self._tokenizer[0] != model:
                tokenizer = arriving.load_tokenizer() if arriving is not None else stored.load_tokenizer(model, weights)
                self._tokenizer = model, tokenizer
            check = partial(check_engine, _backbone(policy), masks, weights.uri) if weights.version == 0 else None
            if arriving is not None:
                arriving.when_settled = check
            else:
                torch.nn.Module.to(policy, self._device)
                if check is not None:
                    check()
        except BaseException:
            if arriving is not None:
                arriving.abandon()
            raise
        return _Loaded(model, weights, policy, self._tokenizer[1], masks, arriving)

    def _drop(self, held: _Loaded) -> None:
        """Give back the memory of a model that is not used any more."""
        arriving = held.arriving
        if arriving is None:
            empty(held.policy)
            return
        if arriving.failed or not arriving.is_settled:
            # The tokenizer is from the same files, which are damaged or not checked yet.
            self._tokenizer = None
        arriving.abandon()

    def sleep(self) -> None:
        """Release the memory of the model and the KV cache. The model is read again from files on the host."""
        if self._loaded is not None:
            self._drop(self._loaded)
        if self._cache is not None:
            self._cache.reset()
        self._loaded = self._cache = self._run = None
        give_back()

    def start(
        self,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        kv_budget_tokens: int | None,
        drafts: Sequence[str] | None = None,
        *,
        keep_kv_cache: bool = False,
        growth: Growth | None = None,
    ) -> ContinuousBatch:
        """Open a run.

        A sequence is admitted when a slot is free. Every slot has room for the longest sequence of the share at its
        full length, so a run never runs out of slots. On a CPU, up to 15 rows of padding come on top of the budget.

        Raises:
            TaskError: `data_invalid` or `bad_request` for a sequence that is too long for the model or the budget.
        """
        if self._loaded is None:
            raise TaskError("model_unloadable", "no weights are loaded")
        model, tokenizer = _backbone(self._loaded.policy), self._loaded.tokenizer
        config = model.config.get_text_config()
        _check_positions(tasks, sampling, getattr(config, "max_position_embeddings", None), growth)
        longest = longest_prompt(tasks, growth) + sampling.max_response_tokens
        held = self._cache.bytes if self._cache is not None else 0
        budget = kv_budget_tokens or free_kv_tokens(config, model.dtype, self._device, held)
        check_room(longest, budget)
        capacity = padded(longest)
        most_rows = min(MAX_ROWS, max(MIN_ROWS, MAX_LOGITS[self._device.type] // config.vocab_size))
        room = EngineRoom(
            sequences=min(most_rows, max(1, budget // capacity)),
            kv_tokens=budget,
            longest_draft=0 if drafts is None else LONGEST_DRAFT,
        )
        slots = min(len(tasks) if growth is None else growth.sequences, room.sequences)
        strings = StopStrings(tokenizer, sampling.stop) if sampling.stop else None
        rows = padded_rows(slots, self._device)
        kept = self._keep(tasks, slots, rows, capacity) if keep_kv_cache else KeptRows()
        self._run = None
        cache = self._reserve(rows, capacity) if self._cache is None or not kept.tasks else self._cache
        kept.move(cache, self._device)
        eos = eos_token_ids(model, tokenizer)
        arriving = self._loaded.arriving
        if arriving is not None and arriving.is_settled:
            # All weights are sound, so no pass has to be computed again.
            arriving = None
        wanted = to_draft_for(tasks, growth)
        drafter = self._drafter(self._loaded, wanted, sampling, slots, longest, drafts) if drafts is not None else None
        masks = self._loaded.masks
        run = ContinuousBatch(
            model, cache, masks, tasks, sampling, eos, strings, slots, room, drafter, most_rows, arriving, kept
        )
        self._run = run if keep_kv_cache else None
        return run

    def _drafter(
        self,
        loaded: _Loaded,
        wanted: tuple[set[int], int],
        sampling: EngineSampling,
        slots: int,
        longest: int,
        folders: Sequence[str],
    ) -> Drafter:
        prompts, sequences = wanted
        history = HistoryLoader(folders, prompts, loaded.tokenizer, self._history) if folders else None
        known_tokens = (1 + len(folders)) * sequences * (sampling.max_response_tokens + MATCH)
        vocabulary = loaded.policy.config.get_text_config().vocab_size
        return Drafter(self._experience, padded_rows(slots, self._device), longest, known_tokens, vocabulary, history)

    def _keep(self, tasks: Sequence[SequenceTask], slots: int, rows: int, capacity: int) -> KeptRows:
        """Return the rows of the last run that tasks continue; none if the cache is too small for the new run."""
        held, run = self._cache, self._run
        if held is None or run is None or held.slots < rows or held.capacity < capacity:
            return KeptRows()
        return keep_rows(run.held_rows(), tasks, slots)

    def _reserve(self, slots: int, capacity: int) -> SlotCache:
        """Return the last run's cache if it is large enough and not far too large, otherwise a new one."""
        held = self._cache
        fits = held is not None and held.slots >= slots and held.capacity >= capacity
        if held is None or not fits or held.slots * held.capacity > 2 * slots * capacity:
            self._cache = held = None
            held = self._cache = SlotCache(slots, capacity)
        return held


def _takes(held: _Loaded, model: ModelSettings, weights: WeightsReference) -> bool:
    """Return whether the model in memory can take these weights in place. With an adapter its backbone stays."""
    return held.settings == model and (model.lora is None or held.weights.uri == weights.uri)


def _can_take(held: _Loaded, model: ModelSettings, weights: WeightsReference) -> bool:
    """Return whether it can, once its own weights have arrived; wait for them if necessary."""
    arriving = held.arriving
    if not _takes(held, model, weights) or (arriving is not None and arriving.failed):
        return False
    if arriving is not None and held.weights != weights:
        try:
            arriving.settle()
        except TaskError as error:
            logger.warning("the weights before did not arrive, and the model is loaded anew: %s", error)
            return False
    return True


def _take_over(held: _Loaded, weights: WeightsReference, prefetched: stored.PrefetchedWeights) -> _Loaded | None:
    """Return the model with prefetched weights; the unchanged model if they are not of use; None if the change broke
    off."""
    if not prefetched.is_of(held.policy, weights):
        return held
    try:
        stored.take_over(prefetched)
    except Exception:
        logger.exception("prefetched weights could not be taken over whole, and the model is loaded anew")
        empty(held.policy)
        return None
    held.weights = weights
    return held


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return every token that ends a response, from the generation config and from the tokenizer."""
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(id for id in [*ids, tokenizer.eos_token_id] if id is not None)


def _check_positions(
    tasks: Sequence[SequenceTask], sampling: EngineSampling, positions: int | None, growth: Growth | None
) -> None:
    prompts = {f"prompt {task.prompt}": len(task.prompt_tokens) for task in tasks}
    if growth is not None:
        prompts["the longest prompt"] = growth.prompt_tokens
    for task in tasks:
        check_prompt(task)
    for name, tokens in prompts.items():
        if positions is not None and tokens + sampling.max_response_tokens > positions:
            raise TaskError(
                "bad_request",
                f"{name} has {tokens} tokens; together with sampling.maxResponseTokens"
                f" ({sampling.max_response_tokens}) that is more than the model's {positions} positions; lower"
                " sampling.maxResponseTokens, or lower sampling.maxPromptTokens to drop the prompt",
            )


def _backbone(policy: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the transformers model itself; adapters are layers inside it."""
    return cast(PreTrainedModel, policy.get_base_model()) if isinstance(policy, PeftModel) else policy
