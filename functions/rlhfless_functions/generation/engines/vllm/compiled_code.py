"""Lets vLLM reuse compiled code for the next version of a model's weights.

vLLM derives the name of compiled code from all settings of the model. The folder of the weights is one of them,
although the code does not depend on it. A job's weights are in another folder after each step, so every start would
compile again.
"""

import copy
from typing import Any


def leave_folder_out() -> None:
    """Remove the weights' folder from the name of compiled code. Call this once, before vLLM compiles."""
    from vllm.config import ModelConfig

    hash_of_all = ModelConfig.compute_hash

    def hash_without_folder(config: Any) -> str:
        anywhere = copy.copy(config)
        anywhere.model = ""
        return hash_of_all(anywhere)

    ModelConfig.compute_hash = hash_without_folder
