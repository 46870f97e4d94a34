"""The engine on vLLM, in this process: paged attention and prefix caching, on a GPU or a CPU."""

import gc
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PretrainedConfig

from rlhfless_functions.api import EngineRoom, WeightsReference
from rlhfless_functions.generation.drafting.drafter import Drafter, DraftExperience
from rlhfless_functions.generation.drafting.history import HistoryCache, HistoryLoader
from rlhfless_functions.generation.drafting.index import MATCH
from rlhfless_functions.generation.engines.base import Growth, SequenceTask, check_room, longest_prompt, to_draft_for
from rlhfless_functions.generation.engines.stop_strings import StopStrings
from rlhfless_functions.generation.engines.vllm.adapters import Adapters
from rlhfless_functions.generation.engines.vllm.arriving import ArrivingWeights, layout_of
from rlhfless_functions.generation.engines.vllm.drafting import LONGEST_DRAFT, DraftedRequests
from rlhfless_functions.generation.engines.vllm.graphs import graph_widths
from rlhfless_functions.generation.engines.vllm.importing import import_vllm
from rlhfless_functions.generation.engines.vllm.installation import vllm_version
from rlhfless_functions.generation.engines.vllm.limits import check_config, check_tasks
from rlhfless_functions.generation.engines.vllm.run import VllmRun
from rlhfless_functions.generation.engines.vllm.salts import CacheSalts
from rlhfless_functions.generation.engines.vllm.sleep import can_sleep, wake, weights_awake
from rlhfless_functions.generation.engines.vllm.starting import start_vllm, warm_up
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, EngineSettings, ModelSettings
from rlhfless_functions.weights.fingerprints import fingerprint
from rlhfless_functions.weights.source import model_revision, read_config, unloadable, weights_folder
from rlhfless_functions.weights.tensors import MismatchError, layout, layout_difference, safetensors_files
from rlhfless_functions.weights.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)

_REMEDY = (
    "set generation.engine to transformers, or name a model that this version of vLLM supports; if it lacks memory,"
    " use an instance with more, or lower sampling.maxResponseTokens"
)


@dataclass
class _Loaded:
    """vLLM's engine, and the weights in it."""

    engine: Any
    settings: ModelSettings
    config: PretrainedConfig
    weights: WeightsReference | None
    """None while it is uncertain which weights are loaded."""
    tensors: dict[str, tuple[int, ...]]
    """Shape of each tensor of the checkpoint, by its name."""
    tokenizer: Any
    end_tokens: list[int]
    backbone: str
    """URI of the weights that vLLM started with."""
    adapters: Adapters | None
    """Set if the job trains an adapter; the backbone then stays as it is."""


class VllmEngine:
    """Holds one model in vLLM; see `Engine`. A process has one engine: loading another one ends the first.

    Args:
        settings: the job's engine settings; `name` is not read here.
    """

    _resident: "ClassVar[VllmEngine | None]" = None

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self._settings = settings or EngineSettings()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._loaded: _Loaded | None = None
        self._usable = False
        self._run: VllmRun | None = None
        self._salts = CacheSalts()
        self._keeps = False
        """Whether the newest run's keys and values may outlive its weights."""
        self._experience = DraftExperience(self._device.type)
        self._history = HistoryCache()

    # --- weights -------------------------------------------------------------------------------------------------

    def load(self, model: ModelSettings, weights: WeightsReference, prefetched: object | None = None) -> None:
        """Hold exactly these weights: replace them in place if the model is the same, start vLLM otherwise.

        Before a replacement in place, names and shapes are compared with those in vLLM. Checksums are compared with the
        manifest during it, and nothing is sampled before they match. Cached prefixes of the old weights are dropped, or
        only found by the responses that they belong to if the last run was opened with `keep_kv_cache`.

        Raises:
            TaskError: `artifact_missing` or `model_unloadable`: the engine then holds nothing, and may load again;
                `engine_lost`: vLLM is between two versions, and the instance must end.
        """
        held, self._usable = self._loaded, False
        self._abandon()
        if weights.adapter is not None and model.lora is None:
            raise TaskError(
                "bad_request", f"{weights.adapter} is given as an adapter, but model.lora is not set; set it"
            )
        if held is None or not self._takes(held, model, weights):
            self._start_engine(model, weights)
        elif (held.settings, held.weights) != (model, weights):
            held.weights = None
            if held.adapters is not None:
                with self._lost_on_failure("woke up"):
                    wake(held.engine)
                held.adapters.use(weights)
            else:
                self._replace(held, weights)
            held.settings, held.weights = model, weights
        self._usable = True

    def prefetch(self, model: ModelSettings, weights: WeightsReference) -> Path:
        """Fetch weights to this machine and check them. Their pages are then in the kernel's cache of files, from which
        `load` reads them.

        Raises:
            TaskError: if they cannot be had.
        """
        uri = weights.adapter or weights.uri
        return weights_folder(uri, revision=model_revision(model, uri))

    def _takes(self, held: _Loaded, model: ModelSettings, weights: WeightsReference) -> bool:
        """Return whether vLLM can take these weights without a restart."""
        if held.adapters is not None:
            same = held.settings.model_copy(update={"lora": model.lora}) == model and held.backbone == weights.uri
            return same and held.adapters.take(model.lora)
        # On a CPU, vLLM packs experts only when it loads them. After a replacement it would compute with garbage.
        packed = self._device.type == "cpu" and held.engine.vllm_config.model_config.is_moe
        return held.settings == model and (held.weights == weights or not packed)

    def _replace(self, held: _Loaded, weights: WeightsReference) -> None:
        revision = model_revision(held.settings, weights.uri)
        folder = weights_folder(weights.uri, revision=revision, verify=False)
        with unloadable(weights.uri, "give weights of the job's own model"):
            files = safetensors_files(folder)
            if difference := layout_difference(held.tensors, layout(files), tied=_tied(held.config)):
                raise MismatchError(difference)
        # Checksums take as long as the replacement, on another core. Weights that don't match are never sampled from.
        with ThreadPoolExecutor(max_workers=1) as checking:
            checked = checking.submit(weights_folder, weights.uri, revision=revision)
            self._take_over(held, weights, files)
            checked.result()

    def _take_over(self, held: _Loaded, weights: WeightsReference, files: Sequence[Path]) -> None:
        taken = f"took over weights version {weights.version}"
        with self._lost_on_failure(taken), weights_awake(held.engine):
            held.engine.collective_rpc("replace_weights", args=([str(file) for file in files], _tied(held.config)))
            if self._keeps:
                self._salts.next_version()
            elif not held.engine.reset_prefix_cache():
                raise RuntimeError("the prefix cache could not be reset")

    @contextmanager
    def _lost_on_failure(self, did: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.close()
            raise _lost(f"vLLM failed while it {did} ({type(error).__name__}: {error})") from error

    def _start_engine(self, model: ModelSettings, weights: WeightsReference) -> None:
        arriving = ArrivingWeights(weights.uri, model)
        try:
            self._start_with(arriving, model, weights)
        except Exception as error:
            try:
                # A download that has failed, or damaged files, make vLLM fail in many ways.
                arriving.check_why(error)
            except TaskError as reason:
                if reason.retryable and self._settings.sleeps and self._device.type == "cuda":
                    # An engine that can sleep starts once in a process.
                    raise _lost(str(reason)) from reason
                raise
            raise
        finally:
            arriving.close()

    def _start_with(self, arriving: ArrivingWeights, model: ModelSettings, weights: WeightsReference) -> None:
        config = read_config(arriving.folder, weights.uri)
        check_config(config, weights.uri)
        tokenizer = load_tokenizer(model, weights, arriving.folder)
        import_vllm()
        arriving.prepare(config, self._settings)
        if arriving.is_whole:
            # Fail before another engine makes way for this one.
            layout_of(arriving.folder, weights.uri)
        if VllmEngine._resident is not None:
            VllmEngine._resident._make_way()
        VllmEngine._resident = self
        try:
            with unloadable(f"{weights.uri}, in vLLM {vllm_version()},", _REMEDY):
                engine = start_vllm(arriving, config, model, self._settings, self._device)
            end_tokens = _end_tokens(arriving.folder, config, tokenizer)
            self._loaded = _Loaded(engine, model, config, weights, {}, tokenizer, end_tokens, weights.uri, None)
            with unloadable(f"{weights.uri}, in vLLM {vllm_version()},", _REMEDY):
                warm_up(engine)
            # Nothing else is sampled before all files are checked.
            folder = arriving.complete()
            self._loaded.tensors = layout_of(folder, weights.uri)
            if model.lora is not None:
                self._loaded.adapters = Adapters(engine, fingerprint(folder), model.lora)
                self._loaded.adapters.use(weights)
        except BaseException:
            self.close()
            raise

    def sleep(self) -> None:
        """Release the device's memory: by vLLM's sleep, or by ending vLLM if it was started without sleep mode.

        With an adapter the weights go to the host's memory, because the next request brings only the adapter. Without
        one they are dropped, because the next request brings all weights.

        Raises:
            TaskError: `engine_lost`: only the end of the process releases the GPU's memory.
        """
        held, self._usable = self._loaded, False
        self._abandon()
        self._keeps = False
        self._salts.left({})
        if held is None:
            return
        if not can_sleep(held.engine):
            del held
            self.close()
            if self._device.type == "cuda":
                # An engine that ends may not free all its memory while its process lives (vllm-project/vllm 21073).
                raise _lost("vLLM was started without `sleeps`, and only the end of its process releases its memory")
            return
        # Load an adapter again too: only vLLM knows whether it still has it.
        held.weights = None
        if not held.engine.is_sleeping():
            with self._lost_on_failure("gave its memory back"):
                held.engine.sleep(level=2 if held.adapters is None else 1)

    def _make_way(self) -> None:
        """End this engine, as another one starts.

        Raises:
            TaskError: `engine_lost`: vLLM can't be started a second time.
        """
        if self._loaded is not None and can_sleep(self._loaded.engine):
            # The allocator that lets it sleep serves one engine a process.
            raise _lost("the request needs another model or other settings, but vLLM can't start a second time here")
        self.close()

    def close(self) -> None:
        """End vLLM's engine and give its memory back."""
        held, self._loaded, self._usable = self._loaded, None, False
        self._salts, self._keeps = CacheSalts(), False
        run, self._run = self._run, None
        if run is not None:
            run.close()
        if VllmEngine._resident is self:
            VllmEngine._resident = None
        if held is not None:
            held.engine.engine_core.shutdown()
            del held
            gc.collect()

    # --- runs ----------------------------------------------------------------------------------------------------

    def start(
        self,
        tasks: Sequence[SequenceTask],
        sampling: EngineSampling,
        kv_budget_tokens: int | None,
        drafts: Sequence[str] | None = None,
        *,
        keep_kv_cache: bool = False,
        growth: Growth | None = None,
    ) -> VllmRun:
        """Open a run.

        vLLM gets sequences in order, as many as its batch holds: a group stays together and shares its prompt. Its free
        blocks then decide which of them run. A budget below the cache's size limits their number: each counts with its
        full length.

        Raises:
            TaskError: `data_invalid` or `bad_request` for a sequence that is too long for the model or the budget;
                `bad_request` for a temperature that vLLM would change, and to keep keys and values with an adapter.
        """
        if self._loaded is None or not self._usable:
            raise TaskError("model_unloadable", "no weights are loaded")
        if keep_kv_cache and self._loaded.adapters is not None:
            raise TaskError(
                "bad_request",
                "async.kvCache is keep, but with model.lora vLLM never finds keys and values of the adapter before;"
                " write recompute, or set generation.engine to transformers",
            )
        self._abandon()
        configuration = self._loaded.engine.vllm_config
        positions = configuration.model_config.max_model_len
        check_tasks(tasks, sampling, positions, growth)
        longest = longest_prompt(tasks, growth) + sampling.max_response_tokens
        cache = configuration.cache_config
        slots = configuration.scheduler_config.max_num_seqs
        budget = (cache.num_gpu_blocks - 1) * cache.block_size
        if kv_budget_tokens is not None and kv_budget_tokens < budget:
            budget = kv_budget_tokens
            padded = -(-longest // cache.block_size) * cache.block_size
            slots = min(slots, max(1, budget // padded))
        check_room(longest, budget)
        # Its prefix cache has all blocks except the last, unfinished one of a sequence.
        drafting = None if drafts is None else configuration.speculative_config
        room = EngineRoom(
            sequences=slots,
            kv_tokens=budget,
            longest_draft=0 if drafting is None else drafting.num_speculative_tokens,
        )
        strings = StopStrings(self._loaded.tokenizer, sampling.stop) if sampling.stop else None
        held = self._loaded
        adapter = held.adapters.request if held.adapters is not None else None
        shared_as = str(held.weights) if self._settings.share_prefixes else None
        wanted = to_draft_for(tasks, growth)
        drafted = self._drafted(held, wanted, sampling, room, longest, drafts) if drafts is not None else None
        self._keeps = keep_kv_cache
        salts = self._salts.of_run(keep=keep_kv_cache)
        self._run = VllmRun(
            held.engine, tasks, sampling, held.end_tokens, strings, room, adapter, shared_as, drafted, salts, growth
        )
        return self._run

    def _drafted(
        self,
        held: _Loaded,
        wanted: tuple[set[int], int],
        sampling: EngineSampling,
        room: EngineRoom,
        longest: int,
        folders: Sequence[str],
    ) -> DraftedRequests | None:
        configuration = held.engine.vllm_config
        if configuration.speculative_config is None:
            return None
        prompts, sequences = wanted
        history = HistoryLoader(folders, prompts, held.tokenizer, self._history)
        known_tokens = (1 + len(folders)) * sequences * (sampling.max_response_tokens + MATCH)
        vocabulary = held.config.get_text_config().vocab_size
        drafter = Drafter(self._experience, room.sequences, longest + LONGEST_DRAFT, known_tokens, vocabulary, history)
        # vLLM measured the memory of passes with one draft for each request of a full batch.
        limits = configuration.scheduler_config
        most_rows = min(2 * limits.max_num_seqs, limits.max_num_batched_tokens)
        longest_draft = configuration.speculative_config.num_speculative_tokens
        widths = graph_widths(configuration)
        if widths:
            most_rows = min(most_rows, configuration.compilation_config.max_cudagraph_capture_size)
        positions = configuration.model_config.max_model_len
        return DraftedRequests(
            drafter, room.sequences, most_rows, sampling.max_response_tokens, longest_draft, positions, widths
        )

    def _abandon(self) -> None:
        if self._run is not None:
            self._salts.left(self._run.unfinished_salts() if self._keeps else {})
            self._run.abort()
            self._run = None


def _lost(why: str) -> TaskError:
    return TaskError("engine_lost", f"{why}; this instance ends, and another one continues", retryable=True)


def _tied(config: PretrainedConfig) -> bool:
    return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))


def _end_tokens(folder: Path, config: PretrainedConfig, tokenizer: Any) -> list[int]:
    """Return every token that ends a response, from the generation config and from the tokenizer."""
    given = folder / "generation_config.json"
    made = GenerationConfig.from_pretrained(folder) if given.is_file() else GenerationConfig.from_model_config(config)
    ids = made.eos_token_id if isinstance(made.eos_token_id, list) else [made.eos_token_id]
    return sorted({id for id in [*ids, tokenizer.eos_token_id] if id is not None})
