"""A model's configuration and layer names, read from a Hugging Face folder without loading weights."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_LONGEST_HEADER = 100 * 2**20
"""The most that the safetensors format allows."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class UnreadableModelError(ValueError):
    """A file of the folder is damaged; the message says which."""


def read_config(folder: Path) -> dict[str, Any]:
    """Return the model's `config.json`.

    Raises:
        UnreadableModelError: it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UnreadableModelError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UnreadableModelError(f"{path} does not hold a JSON object")
    return config


def label_count(config: dict[str, Any]) -> int:
    """Return the number of labels of a sequence classifier. Without a setting, transformers creates two."""
    named = config.get("id2label")
    if isinstance(named, dict):
        return len(named)
    number = config.get("num_labels")
    return number if isinstance(number, int) else 2


def layer_names(folder: Path, config: dict[str, Any]) -> list[str] | None:
    """Return the full names of all layers with a weight matrix, as written in the weights' files.

    Returns:
        None if the files don't tell: if they are not safetensors, or if loading renames the weights, as it does for
        experts and for models with a vision part.

    Raises:
        UnreadableModelError: a file is damaged.
    """
    if any(config.get(field) for field in _EXPERTS) or "vision_config" in config or "text_config" in config:
        return None
    files = sorted(folder.glob("*.safetensors"))
    shapes = {name: shape for file in files for name, shape in _shapes(file)}
    return sorted(name.removesuffix(".weight") for name, shape in shapes.items() if _is_matrix(name, shape)) or None


def _is_matrix(name: str, shape: Any) -> bool:
    return name.endswith(".weight") and isinstance(shape, list) and len(shape) == 2


def _shapes(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and shapes of a safetensors file's tensors, from its header."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length)) if length <= _LONGEST_HEADER else None
    except (OSError, ValueError, struct.error) as error:
        raise UnreadableModelError(f"{file} is not a complete safetensors file ({error})") from error
    if not isinstance(header, dict):
        raise UnreadableModelError(f"{file} is not a safetensors file: its header is not a JSON object")
    for name, tensor in header.items():
        if isinstance(tensor, dict) and name != "__metadata__":
            yield name, tensor.get("shape")
