"""Imports vLLM, in the environment that it needs."""

import logging
import warnings

import torch

from rlhfless_functions.generation.engines.vllm.arguments import prepare_environment


def import_vllm() -> None:
    """Set the environment that vLLM needs and import it, which takes seconds. This starts no thread yet."""
    prepare_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    import vllm.v1.engine.llm_engine  # noqa: F401
