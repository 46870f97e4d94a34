"""Fingerprints of weights: they tell one set of weights from another without reading all of it."""

import hashlib
import json
import struct
from pathlib import Path
from typing import BinaryIO

from rlhfless_functions.weights.tensors import safetensors_files

_SAMPLE = 1024
"""Bytes to read at the beginning, in the middle and at the end of each tensor."""


def fingerprint(folder: Path) -> str:
    """Return a digest of names, formats, shapes and samples of all tensors, in any division into files.

    A copy has the same fingerprint in any place and any sharding. Weights of the same shapes from another training have
    a different one. It takes about 3 KiB of reading per tensor.

    Args:
        folder: Hugging Face folder with safetensors.

    Returns:
        16 hexadecimal digits.

    Raises:
        MismatchError: if there are no safetensors.
    """
    tensors: dict[str, str] = {}
    for path in safetensors_files(folder):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, tensor in header.items():
                start, end = (8 + length + offset for offset in tensor["data_offsets"])
                tensors[name] = f"{tensor['dtype']} {tensor['shape']} {_sampled(file, start, end)}"
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).hexdigest()[:16]


def _sampled(file: BinaryIO, start: int, end: int) -> str:
    digest = hashlib.sha256()
    for place in (start, (start + end) // 2, max(start, end - _SAMPLE)):
        file.seek(place)
        digest.update(file.read(min(_SAMPLE, end - place)))
    return digest.hexdigest()
