"""The generation engines that the parts of `measure.py` use, and their settings."""

from typing import Any

from rlhfless_functions.generation.engines.choice import EngineChoice, choose_engine, make_engine
from rlhfless_functions.settings import EngineName, EngineSettings, ModelSettings, VllmSettings

KV_TOKENS = 32_768


def best_engine() -> EngineName:
    """vLLM where it is installed and the device can, transformers elsewhere: what `engine: auto` takes."""
    return choose_engine(EngineSettings(), ModelSettings(source="unused")).name


def live_engines() -> list[EngineName]:
    """Every one that there is here."""
    return ["transformers", "vllm"] if best_engine() == "vllm" else ["transformers"]


def engine_settings(name: EngineName, sequence_tokens: int) -> EngineSettings:
    """For measuring weights and sleeps: vLLM without CUDA graphs, whose making takes most of a start and which neither
    is about.

    Args:
        name: of the engine.
        sequence_tokens: of the longest sequence.
    """
    return EngineSettings(
        name=name,
        sequence_tokens=sequence_tokens,
        kv_budget_tokens=KV_TOKENS,
        vllm=VllmSettings(gpu_memory_utilization=0.6, enforce_eager=True),
    )


def live_engine(name: EngineName, settings: EngineSettings) -> Any:
    """An engine that holds nothing yet."""
    return make_engine(EngineChoice(name, "the benchmark says so"), settings)
