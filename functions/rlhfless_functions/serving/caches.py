"""The folder for an instance's downloads and compiled code. It outlives the instance, and instances may share it."""

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
"""Folders by environment variable: for the hub's models, vLLM's compiled code, and so on. Instances may share them:
vLLM, torch, Triton and the hub's library lock their files or replace them whole."""


def keep_caches(folder: str, environment: MutableMapping[str, str]) -> None:
    """Make libraries that are imported later keep their caches in this folder, unless the environment sets another.

    If the folder is not writable, caches stay where they were, and instances start more slowly.

    Args:
        folder: an absolute path; created if missing.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"user {os.geteuid()} may not write to it")
    except OSError as error:
        logger.warning(
            "RLHFLESS_CACHE: %s can't be used (%s), and each start downloads and compiles again; give this user"
            " permission to write to it, or name another folder",
            folder,
            error,
        )
        return
    for variable, name in FOLDERS.items():
        environment.setdefault(variable, str(Path(folder) / name))
