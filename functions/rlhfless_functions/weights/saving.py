"""Writing models and tokenizers as Hugging Face folders.

A version is published in every training step, and only its tensors change. So the files of the configuration and the
tokenizer are made once, and written again from memory.
"""

import copy
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

SHARD_BYTES = 250 * 10**6
"""Bytes above which a version's weights are written in several files: several are written, and those that are complete
are flushed or uploaded, at a time."""
HUB_SHARD_BYTES = 5 * 10**9
"""The same of a model for people: as other tools write them."""
_WRITERS = 4
"""Threads that write files."""

Files = dict[str, bytes]
"""Content of small files by their names."""

_settings: WeakKeyDictionary[PreTrainedModel, dict[torch.dtype, Files]] = WeakKeyDictionary()
_tokenizers: WeakKeyDictionary[PreTrainedTokenizerBase, Files] = WeakKeyDictionary()
_PLACES = ("is_local", "local_files_only")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def write_model(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype | None = None,
    *,
    state: Mapping[str, Tensor] | None = None,
    shard_bytes: int | None = None,
    finish: Callable[[str], None] = lambda name: None,
) -> None:
    """Write a model's configuration, generation configuration and weights as `save_pretrained` does.

    Args:
        model: the model. Its configurations are those of its first writing.
        folder: an existing folder.
        dtype: number format of the written weights; by default the model's own.
        state: the model's state in `dtype`, such as an earlier one; by default the present one.
        shard_bytes: see `write_tensors`.
        finish: see `write_tensors`.

    Raises:
        OSError: if the disk is full.
    """
    dtype = dtype or model.dtype
    write_settings(model, folder, dtype)
    # Transformers may hold tensors under other names, or fused. The folder has the architecture's published layout.
    own = converted(model, dtype) if state is None else dict(state)
    published = revert_weight_conversion(model, own)
    # It sorts them by name. Of the two names of an embedding that is also the output layer, all readers know the first.
    places = {name: place for place, name in enumerate(own)}
    in_order = sorted(published, key=lambda name: places.get(name, len(places)))
    write_tensors({name: published[name] for name in in_order}, folder, shard_bytes=shard_bytes, finish=finish)


def write_settings(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Write a model's configuration and generation configuration, as they were when they were first written.

    Raises:
        OSError: if the disk is full.
    """
    by_dtype = _settings.setdefault(model, {})
    if dtype not in by_dtype:
        by_dtype[dtype] = _files(lambda scratch: _save_settings(model, dtype, scratch))
    _write(by_dtype[dtype], folder)


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a tokenizer, as it was when it was first written.

    Raises:
        OSError: if the disk is full.
    """
    if tokenizer not in _tokenizers:
        _tokenizers[tokenizer] = _files(lambda scratch: _save_tokenizer(tokenizer, scratch))
    _write(_tokenizers[tokenizer], folder)


def write_tensors(
    tensors: Mapping[str, Tensor],
    folder: Path,
    *,
    shard_bytes: int | None = None,
    finish: Callable[[str], None] = lambda name: None,
) -> None:
    """Write safetensors files; of tied tensors, only one is written.

    Args:
        tensors: the tensors, on any device.
        folder: an existing folder.
        shard_bytes: bytes above which a file is split; by default `SHARD_BYTES`.
        finish: called with the name of each file that is complete, from several threads.

    Raises:
        OSError: if the disk is full.
    """
    first_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    distinct = {name: _alone(tensors[name]) for name in first_names.values()}
    shards = split(distinct, shard_bytes)
    files = shard_names(len(shards))
    write_shards(dict(zip(files, shards, strict=True)), folder, finish)
    if len(files) > 1:
        write_index({file: sizes(shard) for file, shard in zip(files, shards, strict=True)}, folder)


def split(tensors: dict[str, Tensor], shard_bytes: int | None = None) -> list[dict[str, Tensor]]:
    """Return the tensors of each file, at least one. None of them shares memory with another."""
    shards = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_bytes or SHARD_BYTES)
    return [{name: tensors[name] for name in names} for names in shards.filename_to_tensors.values()] or [{}]


def shard_names(files: int) -> list[str]:
    """Return the names of so many files of one model, as the Hugging Face hub has them."""
    if files == 1:
        return ["model.safetensors"]
    return [f"model-{number + 1:05d}-of-{files:05d}.safetensors" for number in range(files)]


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of each tensor."""
    return {name: tensor.nbytes for name, tensor in tensors.items()}


def write_shards(shards: Mapping[str, Mapping[str, Tensor]], folder: Path, finish: Callable[[str], None]) -> None:
    """Write safetensors files, several at a time.

    Args:
        shards: tensors by the names of their files.
        folder: an existing folder.
        finish: called with the name of each file that is complete, from several threads.

    Raises:
        OSError: if the disk is full.
    """

    def write(name: str) -> None:
        contiguous = {key: tensor.contiguous() for key, tensor in shards[name].items()}
        with saving():
            save_file(contiguous, folder / name, metadata={"format": "pt"})
        finish(name)

    with ThreadPoolExecutor(_WRITERS) as pool:
        for written in [pool.submit(write, name) for name in shards]:
            written.result()


def write_index(bytes_of: Mapping[str, Mapping[str, int]], folder: Path) -> None:
    """Write the index of a model in several files.

    Args:
        bytes_of: bytes of each tensor, by the name of its file.
        folder: the folder of the files.

    Raises:
        OSError: if the disk is full.
    """
    place = {name: file for file, tensors in bytes_of.items() for name in tensors}
    total = sum(size for tensors in bytes_of.values() for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def converted(module: nn.Module, dtype: torch.dtype, *, copied: bool = False) -> dict[str, Tensor]:
    """Return a module's state with its floating-point tensors in `dtype`; tied tensors stay tied.

    Args:
        module: the module.
        dtype: number format.
        copied: whether all tensors are copies in the host's memory, which do not change while the module learns.
    """
    made: dict[int, Tensor] = {}
    state = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in made:
            plain = tensor.detach()
            kind = dtype if plain.is_floating_point() else plain.dtype
            made[id(tensor)] = host_copy(plain, kind) if copied else plain.to(kind)
        state[name] = made[id(tensor)]
    return state


def host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of a tensor in the host's memory, in a number format."""
    there = tensor.to(dtype).to("cpu")
    return there.clone() if there is tensor else there


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer without what transformers notes of the place that it was loaded from: a run and its replay must
    write the same."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    known = json.loads(file.read_text(encoding="utf-8"))
    kept = {name: value for name, value in known.items() if name not in _PLACES}
    if kept != known:
        file.write_text(json.dumps(kept, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor with memory of its own: one that was cut out of a fused tensor can't be saved as it is."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


@contextmanager
def saving() -> Iterator[None]:
    """Raise the operating system's refusal as the OSError that it is. safetensors turns it into a text, and
    `torch.save` to a Python file into another error's context."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
    except SafetensorError as error:
        if number := _OS_ERROR.search(str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def _save_settings(model: PreTrainedModel, dtype: torch.dtype, folder: Path) -> None:
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def _files(save: Callable[[Path], object]) -> Files:
    with tempfile.TemporaryDirectory() as scratch:
        save(Path(scratch))
        return {path.name: path.read_bytes() for path in Path(scratch).iterdir()}


def _write(files: Files, folder: Path) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
