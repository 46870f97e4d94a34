"""The tensors in safetensors files that are being fetched: each can be read as soon as its bytes are there."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhfless_functions import artifacts
from rlhfless_functions.weights.tensors import MismatchError

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_LONGEST_HEADER = 100 * 2**20


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in a safetensors file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class ArrivingFiles:
    """The files of a model's weights. The constructor waits for the index of the shards, or for the header of the one
    file.

    Args:
        folder: the folder of the weights.

    Raises:
        MismatchError: there are no such files, or they hold other things than real numbers.
        Exception: an error of fetching.
    """

    def __init__(self, folder: artifacts.Arriving) -> None:
        self._folder = folder
        self._headers: dict[str, dict[str, _Place]] = {}
        self._opened: dict[str, BinaryIO] = {}
        self.file_of = self._find(folder.names())
        """The file that holds each tensor, by the tensor's name."""

    def known_shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor, if the header of its file has been read."""
        place = self._headers.get(self.file_of[name], {}).get(name)
        return place.shape if place is not None else None

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor as soon as it has arrived. Its file may not be checked yet.

        Raises:
            MismatchError: it has another shape, or does not exist.
            BegunAgainError: a file was begun again.
            Exception: an error of fetching.
        """
        file = self.file_of[name]
        place = self._header(file)[name]
        if place.shape != shape:
            raise MismatchError(f"{name} {list(place.shape)} for {list(shape)}")
        self._folder.wait(file, place.end)
        if file not in self._opened:
            self._opened[file] = self._folder.read(lambda path: (path / file).open("rb", buffering=0))
        content = _exactly(self._opened[file], place.start, place.end - place.start)
        return content.view(place.dtype).view(place.shape)

    def close(self) -> None:
        """Close the files."""
        for file in self._opened.values():
            file.close()

    def _find(self, names: frozenset[str]) -> Mapping[str, str]:
        if SAFE_WEIGHTS_INDEX_NAME not in names:
            if SAFE_WEIGHTS_NAME not in names:
                raise MismatchError(f"there is no {SAFE_WEIGHTS_NAME}")
            return dict.fromkeys(self._header(SAFE_WEIGHTS_NAME), SAFE_WEIGHTS_NAME)
        self._folder.wait_for(SAFE_WEIGHTS_INDEX_NAME)
        content = self._folder.read(lambda path: (path / SAFE_WEIGHTS_INDEX_NAME).read_text())
        files: dict[str, str] = json.loads(content)["weight_map"]
        if unknown := set(files.values()) - names:
            raise MismatchError(f"there is no {sorted(unknown)[0]}")
        return files

    def _header(self, file: str) -> dict[str, _Place]:
        if file not in self._headers:
            self._folder.wait(file, 8)
            (length,) = struct.unpack("<Q", self._folder.read(lambda path: _beginning(path / file, 0, 8)))
            if length > _LONGEST_HEADER:
                raise MismatchError(f"{file} is no safetensors file")
            self._folder.wait(file, 8 + length)
            header = json.loads(self._folder.read(lambda path: _beginning(path / file, 8, length)))
            header.pop("__metadata__", None)
            places = {}
            for name, tensor in header.items():
                if (dtype := _DTYPES.get(tensor["dtype"])) is None:
                    raise MismatchError(f"{name} holds {tensor['dtype']}")
                start, end = (8 + length + offset for offset in tensor["data_offsets"])
                places[name] = _Place(dtype, tuple(tensor["shape"]), start, end)
            self._headers[file] = places
        return self._headers[file]


def _beginning(path: Path, start: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(size)


def _exactly(file: BinaryIO, start: int, size: int) -> Tensor:
    content = torch.empty(size, dtype=torch.uint8)
    view = memoryview(content.numpy())
    file.seek(start)
    done = 0
    while done < size:
        if not (read := file.readinto(view[done:])):  # type: ignore[attr-defined]
            raise MismatchError("a file ends before its tensors do")
        done += read
    return content
