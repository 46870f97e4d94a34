"""Tensors from safetensors files into a module, in place: everything is checked before anything is written."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from rlhfless_functions.artifacts.names import inside

_FLOATING = {"F64", "F32", "F16", "BF16"}


class MismatchError(ValueError):
    """The source holds other tensors than the module."""


def safetensors_files(folder: Path) -> list[Path]:
    """Return the files of a folder's weights: one, or the shards that its index names.

    Raises:
        MismatchError: there are none, or the index names files outside the folder.
    """
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        try:
            return [folder / inside(name) for name in shards]
        except ValueError as error:
            raise MismatchError(f"{index.name} names a file that is not the model's: {error}") from error
    single = folder / SAFE_WEIGHTS_NAME
    if not single.is_file():
        raise MismatchError(f"there is no {single.name}")
    return [single]


def layout(files: Sequence[Path]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in safetensors files, by its name. No tensor is read."""
    shapes = {}
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as handle:
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                shapes[name] = tuple(handle.get_slice(name).get_shape())
    return shapes


def layout_difference(
    wanted: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]], *, tied: bool
) -> str:
    """Describe how other tensors differ from those of a model; empty if they do not.

    Args:
        wanted: the model's shapes, by name.
        given: the others' shapes, by name.
        tied: whether the output layer shares the embedding's weight, which may then be stored for only one of them.
    """
    optional = {"lm_head.weight"} if tied else set()
    problems = {
        "missing": sorted(wanted.keys() - given.keys() - optional),
        "of another shape": [
            f"{name} {list(given[name])} for {list(shape)}"
            for name, shape in wanted.items()
            if name in given and given[name] != shape
        ],
        "unknown": sorted(given.keys() - wanted.keys() - optional),
    }
    return "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)


def load_into(module: nn.Module, files: Sequence[Path]) -> None:
    """Fill a module's parameters and persistent buffers from safetensors files, converting between float formats.

    The module's own memory is filled. A module with replaced weights is therefore equal to a fresh one: the alignment
    of a tensor can change the last bits of what is computed with it.

    Raises:
        MismatchError: names or shapes differ; the module is unchanged.
        ValueError: there are integers for real numbers; the module is unchanged.
    """
    with torch.no_grad():
        for target, tensor in pairs_of_files(module, files):
            target.copy_(tensor)


def map_into(module: nn.Module, files: Sequence[Path]) -> None:
    """Do the same for a module that never changes: it keeps the files' own pages instead of a copy.

    All processes of a machine that map a file share its pages, which are in memory once, as the file cache. A process
    that writes to them gets its own copy, and the file stays unchanged. Tensors in another format than the module's are
    converted, and so copied. Where a tensor begins in its page depends on the file alone. So every process computes the
    same bits with it.

    Raises:
        MismatchError: names or shapes differ; the module is unchanged.
        ValueError: there are integers for real numbers; the module is unchanged.
    """
    with ExitStack() as stack, torch.no_grad():
        for target, tensor in _pairs(module, files, stack):
            if target.dtype == tensor.dtype:
                target.data = tensor
            else:
                target.copy_(tensor)


def pairs_of_files(module: nn.Module, files: Sequence[Path]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each distinct tensor of a module with its source in safetensors files, which may be in another float
    format.

    Raises:
        MismatchError: names or shapes differ; raised before the first pair.
        ValueError: there are integers for real numbers; raised before the first pair.
    """
    with ExitStack() as stack:
        yield from _pairs(module, files, stack)


def pairs_in_memory(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Do the same for sources in memory."""
    shapes = {name: (tuple(tensor.shape), tensor.is_floating_point()) for name, tensor in tensors.items()}
    for target, name in plan_of(module, shapes):
        yield target, tensors[name]


def _pairs(module: nn.Module, files: Sequence[Path], stack: ExitStack) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each distinct tensor of the module with its source, which is the file's memory as long as it is
    referenced."""
    shapes, handles = shapes_of(files, stack)
    for target, name in plan_of(module, shapes):
        yield target, handles[name].get_tensor(name)


def shapes_of(
    files: Sequence[Path], stack: ExitStack
) -> tuple[dict[str, tuple[tuple[int, ...], bool]], dict[str, Any]]:
    """Return the shape of each tensor in safetensors files, with whether it holds real numbers, and its open file."""
    handles = {}
    shapes = {}
    for file in files:
        # safetensors reports a file without read permission as a missing one.
        file.open("rb").close()
        handle = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        for name in handle.keys():  # noqa: SIM118 - it is no mapping
            view = handle.get_slice(name)
            handles[name] = handle
            shapes[name] = (tuple(view.get_shape()), view.get_dtype() in _FLOATING)
    return shapes, handles


def plan_of(module: nn.Module, shapes: Mapping[str, tuple[tuple[int, ...], bool]]) -> list[tuple[Tensor, str]]:
    """Return each distinct tensor of the module, in its order, with its name in the source. Tied tensors may have
    either name.

    Args:
        module: the module to fill.
        shapes: for each name in the source, the shape, and whether it holds real numbers.

    Raises:
        MismatchError: names or shapes differ.
        ValueError: there are integers for real numbers.
    """
    names_of: dict[int, list[str]] = {}
    targets: dict[int, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
        targets[id(tensor)] = tensor
    missing: list[str] = []
    different: list[str] = []
    plan: list[tuple[Tensor, str]] = []
    for key, names in names_of.items():
        target = targets[key]
        found = next((name for name in names if name in shapes), None)
        if found is None:
            missing.append(names[0])
        elif shapes[found][1] != target.is_floating_point():
            raise ValueError(f"{found} holds {'real numbers' if shapes[found][1] else 'integers'}")
        elif shapes[found][0] != tuple(target.shape):
            different.append(f"{found} {list(shapes[found][0])} for {list(target.shape)}")
        else:
            plan.append((target, found))
    unexpected = shapes.keys() - {name for names in names_of.values() for name in names}
    if missing or different or unexpected:
        problems = {"missing": missing, "of another shape": different, "unknown": sorted(unexpected)}
        raise MismatchError("; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names))
    return plan


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
