"""Where an instance keeps what it downloads and compiles: a folder that outlasts it and that instances may share."""

import logging
import os
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDERS = {
    "HF_HOME": "huggingface",
    "VLLM_CACHE_ROOT": "vllm",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "XDG_CACHE_HOME": "other",
}
"""By the variable that says it: the folder of the hub's models, of vLLM's compiled code, and so on. vLLM, torch, Triton
and the hub's library lock their files or replace them whole. So instances may share them."""


def keep_caches(folder: str, environment: MutableMapping[str, str]) -> None:
    """Have all that is imported from now on keep its cache in this folder, unless the environment says otherwise.

    Where the folder can't be written to, caches stay where they were: an instance without them starts more slowly.

    Args:
        folder: an absolute path; made if it is not there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"user {os.geteuid()} may not write to it")
    except OSError as error:
        logger.warning(
            "RLHFLESS_CACHE: nothing is kept in %s (%s): each start downloads and compiles anew. Give this user"
            " permission to write to it, or name another folder",
            folder,
            error,
        )
        return
    for variable, name in FOLDERS.items():
        environment.setdefault(variable, str(Path(folder) / name))
