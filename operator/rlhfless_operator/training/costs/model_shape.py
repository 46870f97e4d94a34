"""The shape of the model that a job names. Forecasts of latency and memory rest on it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rlhfless_functions import artifacts
from rlhfless_operator.planner.latency.devices import model_shape
from rlhfless_operator.planner.latency.roofline import MODELS, ModelShape
from rlhfless_operator.training.costs.hub import HubUnavailableError, cached_config

_MOST_BYTES = 2**22
_KNOWN = Path(__file__).with_name("known_models.yaml")
_QUANTIZED = ("awq", "gptq", "fp8", "int4", "int8", "4bit", "8bit", "bnb", "gguf", "mlx", "w4a16", "w8a8")
"""Words in the names of models whose weights are smaller than those of the model that they were made from."""

AskHub = Callable[[str, str | None], dict[str, Any]]
"""Fetches a model's configuration from the hub, by its name and revision. Raises HubUnavailableError."""


def find_shape(
    source: str, field: str = "model.source", *, revision: str | None = None, ask_hub: AskHub | None = None
) -> ModelShape:
    """Find the shape of a model, by its folder or its name, such as `Qwen/Qwen2.5-7B-Instruct`.

    It is counted from the folder or the hub's cache, taken from the known names, or asked of the hub.

    Args:
        field: the field that names the model, for the error.
        revision: branch, tag or commit, for a name on the hub.
        ask_hub: called for an unknown name; the hub is not asked if left out.

    Raises:
        ValueError: for an unknown name, a folder without a configuration, or a model that can't be forecast.
    """
    if Path(source).is_dir():
        return read_model_shape(Path(source))
    name = source.rsplit("/", 1)[-1]
    cached = cached_config(source, revision)
    if (known := _known_shape(name)) is not None and not _is_whole(cached):
        return known
    if cached is not None:
        return _measured_twin(model_shape(name, cached))
    hub = ""
    if ask_hub is not None:
        try:
            return _measured_twin(model_shape(name, ask_hub(source, revision)))
        except HubUnavailableError as error:
            hub = f" and the hub could not be asked ({error})"
    raise ValueError(
        f"{field} is {source!r}, which is no folder here, nothing in the hub's cache and no name that is known{hub}:"
        f" give the folder of a Hugging Face model, of which its config.json is enough, or a name such as"
        f" {', '.join(MODELS)}"
    )


def read_model_shape(folder: Path) -> ModelShape:
    """Read the shape from a Hugging Face model's `config.json`.

    Raises:
        ValueError: if the file is missing or lacks a field of a decoder.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder of a Hugging Face model")
    try:
        config = artifacts.read_json(str(path), most=_MOST_BYTES)
    except artifacts.ArtifactError as error:
        raise ValueError(str(error)) from error
    return _measured_twin(model_shape(folder.name, config))


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configurations of well-known models, by the beginning of their names in lower case."""
    entries: list[dict[str, Any]] = yaml.safe_load(_KNOWN.read_text(encoding="utf-8"))
    return {name: entry["config"] for entry in entries for name in entry["names"]}


def _known_shape(name: str) -> ModelShape | None:
    """Return the shape of a model whose name is a known one, or one followed by a variant's name."""
    lower = name.lower().removeprefix("meta-")
    if any(word in lower for word in _QUANTIZED):
        return None
    known = [(begin, config) for begin, config in known_models().items() if _begins(lower, begin)]
    if known:
        _, config = max(known, key=lambda each: len(each[0]))
        return _measured_twin(model_shape(name, config))
    return next((shape for shape in MODELS.values() if _begins(lower, shape.name.lower())), None)


def _begins(name: str, begin: str) -> bool:
    return name == begin or name.startswith(f"{begin}-")


def _is_whole(config: dict[str, Any] | None) -> bool:
    """Return whether a configuration has all fields that a shape is counted from. Those of models that also see often
    lack some."""
    if config is None:
        return False
    try:
        model_shape("", config)
    except ValueError:
        return False
    return True


def _measured_twin(shape: ModelShape) -> ModelShape:
    """Return the model of the same shape whose latency was measured, or the shape itself."""

    def is_same(model: ModelShape) -> bool:
        same = (model.layers, model.kv_bytes) == (shape.layers, shape.kv_bytes)
        return same and abs(model.parameters - shape.parameters) < 0.01 * model.parameters

    twin = next(filter(is_same, MODELS.values()), None)
    return shape if twin is None else replace(twin, layer=shape.layer)
