"""Code that vLLM compiled for one version of a model's weights, found again for the next.

vLLM names compiled code after all settings of the model, and the folder of the weights is one of them. The code does
not depend on it. A job's weights are in another folder after each step, and every start would compile again.
"""

import copy
from typing import Any


def leave_folder_out() -> None:
    """Have vLLM name compiled code after everything but the weights' folder. Call it once, before vLLM compiles."""
    from vllm.config import ModelConfig

    hash_of_all = ModelConfig.compute_hash

    def hash_without_folder(config: Any) -> str:
        anywhere = copy.copy(config)
        anywhere.model = ""
        return hash_of_all(anywhere)

    ModelConfig.compute_hash = hash_without_folder
