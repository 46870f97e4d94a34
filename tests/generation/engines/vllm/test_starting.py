"""The size of vLLM's batches on a GPU, and the draw that vLLM measures its memory with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhfless_functions.api import EngineRoom
from rlhfless_functions.settings import EngineSettings
from rlhfless_functions.weights.source import read_config
from rlhfless_operator.job.actor_range import ActorRange
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.training.costs.generation_plan import limits_of
from tests.generation.engines.shares import SAMPLING, settings_of, share, version
from tests.generation.engines.shares import folder as folder  # A fixture.

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.generation.engines.vllm.graphs import WIDTHS
from rlhfless_functions.generation.engines.vllm.importing import import_vllm
from rlhfless_functions.generation.engines.vllm.starting import start_vllm

torch.set_num_threads(1)
GIB = 2**30


def arguments_on(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    gigabytes: int,
    lora: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Return vLLM's arguments on such a GPU, with what it makes of those that we leave to it."""
    import_vllm()
    from vllm.engine import arg_utils
    from vllm.v1.engine.llm_engine import LLMEngine

    gpu = SimpleNamespace(
        get_device_total_memory=lambda: gigabytes * GIB,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )

    def sizes(arguments: Any, usage: Any = None) -> Any:
        if usage is None:
            usage = LLMEngine.from_engine_args.__func__.__defaults__[0]
        model = SimpleNamespace(max_model_len=1024, is_multimodal_model=False)
        with monkeypatch.context() as patch:
            patch.setattr(arg_utils, "current_platform", gpu)
            arguments.enable_chunked_prefill = True
            arguments._set_default_max_num_seqs_and_batched_tokens_args(
                usage, model, SimpleNamespace(use_batched_dp_moe=False)
            )
        return arguments

    with monkeypatch.context() as patch:
        patch.setattr(LLMEngine, "from_engine_args", sizes)
        arriving = SimpleNamespace(folder=folder, arguments=dict)
        given = EngineSettings.model_validate(settings)
        config = read_config(folder, str(folder))
        model = settings_of(folder).model_validate(settings_of(folder).model_dump() | {"lora": lora})
        return start_vllm(arriving, config, model, given, torch.device("cuda"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gigabytes", "sequences", "tokens"),
    [("NVIDIA H100 80GB HBM3", 80, 1024, 16_384), ("NVIDIA A10", 24, 256, 8192), ("NVIDIA H200", 141, 1024, 16_384)],
)
def test_batches_are_as_large_as_the_gpu_s_memory_lets_vllm_make_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, gigabytes: int, sequences: int, tokens: int
) -> None:
    made = arguments_on(folder, monkeypatch, name, gigabytes)
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (sequences, tokens)


def test_sizes_that_a_job_names_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = {"extra_args": {"max_num_seqs": 32}}
    assert arguments_on(folder, monkeypatch, "NVIDIA H100 80GB HBM3", 80, vllm=vllm).max_num_seqs == 32


@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_drafting_takes_nothing_from_the_size_of_a_gpu_s_batches(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    made = arguments_on(folder, monkeypatch, "NVIDIA H100 80GB HBM3", 80, lora, drafting="auto")
    assert made.speculative_config["num_speculative_tokens"] == WIDTHS[-1] - 1
    assert (made.max_num_seqs, made.max_num_batched_tokens) == (1024, 16_384)


@pytest.mark.parametrize("settings", [{"share_prefixes": True}, {"vllm": {"tensor_parallel_size": 2}}])
def test_what_drafting_does_not_support_starts_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    made = arguments_on(folder, monkeypatch, "NVIDIA H100 80GB HBM3", 80, drafting="auto", **settings)
    assert made.speculative_config is None


def test_the_planner_sees_as_many_sequences_as_vllm_has_and_memory_is_measured_with_our_draw(
    folder: Path, tiny_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker.cpu_worker import CPUWorker

    measured_with: list[str] = []
    measure = CPUWorker.determine_available_memory

    def determine(worker: Any) -> int:
        measured_with.append(type(worker.model_runner.sampler.topk_topp_sampler).__name__)
        return measure(worker)

    monkeypatch.setattr(CPUWorker, "determine_available_memory", determine)
    vllm = {"extra_args": {"max_num_seqs": 1024}}
    engine = VllmEngine(EngineSettings.model_validate({"kv_budget_tokens": 2048, "sequence_tokens": 128, "vllm": vllm}))
    engine.load(settings_of(folder), version(folder))
    assert measured_with == ["CounterSampler"]
    room = engine.start(share(1, 1), SAMPLING, None).room
    runner = engine._loaded.engine.model_executor.driver_worker.worker.model_runner  # type: ignore[union-attr]
    runner._dummy_sampler_run(torch.zeros(1024, 32))
    engine.close()
    assert room.sequences == 1024
    spec = load_job(tiny_job()).spec
    assert limits_of(spec, ActorRange(1, 2), EngineRoom(**room.model_dump())).max_batch == 1024
