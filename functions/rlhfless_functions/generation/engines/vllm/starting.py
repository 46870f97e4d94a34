"""Starts an imported vLLM, and has it do the slow work of a first request."""

from contextlib import suppress
from dataclasses import fields
from typing import Any

import torch
from transformers import PretrainedConfig

from rlhfless_functions.api import EngineRoom
from rlhfless_functions.generation.engines.base import NonFiniteLogitsError, SequenceTask
from rlhfless_functions.generation.engines.vllm.arguments import engine_arguments
from rlhfless_functions.generation.engines.vllm.arriving import ArrivingWeights
from rlhfless_functions.generation.engines.vllm.run import VllmRun
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSampling, EngineSettings, ModelSettings


def start_vllm(
    weights: ArrivingWeights,
    config: PretrainedConfig,
    model: ModelSettings,
    settings: EngineSettings,
    device: torch.device,
) -> Any:
    """Start vLLM's engine with weights that may not be checked yet, and return it.

    Args:
        weights: the weights to load.
        config: configuration of the weights.
        model: the job's model.
        settings: the job's engine settings.
        device: kind of the device.

    Raises:
        TaskError: `bad_request` for settings that vLLM can't have.
        Exception: an error of vLLM.
    """
    if device.type == "cpu":
        # A process has to ask the kernel for matrix tiles, or dies at the first use. vLLM's kernels do not ask.
        torch.cpu._init_amx()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.llm_engine import LLMEngine

    known = frozenset(field.name for field in fields(EngineArgs))
    arguments = engine_arguments(weights.folder, config, model, settings, device, known) | weights.arguments()
    if settings.share_prefixes:
        from vllm.config import KVTransferConfig

        from rlhfless_functions.generation.engines.vllm.prefixes import connector_settings

        arguments["kv_transfer_config"] = KVTransferConfig(**connector_settings())
    # On a GPU, vLLM chooses the sizes of its batches by the memory only for a use that it knows: 1,024 sequences and
    # 16,384 tokens with 80 GB (an A100 apart), 256 and 8,192 with less. Otherwise they are 128 and 2,048.
    usage = UsageContext.ENGINE_CONTEXT if device.type == "cpu" else UsageContext.LLM_CLASS
    return LLMEngine.from_engine_args(EngineArgs(**arguments), usage)


def warm_up(engine: Any) -> None:
    """Sample one response, to do the slow first-time work before the instance is ready.

    Raises:
        Exception: an error of vLLM. Every instance would have it, so a retry elsewhere would not help.
    """
    sampling = EngineSampling(max_response_tokens=2)
    run = VllmRun(engine, [SequenceTask(0, 0, [0], seed=0)], sampling, [], None, EngineRoom(sequences=1, kv_tokens=1))
    try:
        # Weights that give NaN fail their first request, and its error names them.
        with suppress(NonFiniteLogitsError):
            while run.running or run.waiting:
                run.step()
    except TaskError as error:
        raise error.__cause__ or error from None
