"""The shape of the model that a job names, which latency and memory are forecast from."""

import json
from pathlib import Path

from rlhfless_operator.planner.devices import model_shape
from rlhfless_operator.planner.roofline import MODELS, ModelShape


def find_shape(source: str, field: str = "model.source") -> ModelShape:
    """The shape of a model: counted from its folder, or known by its name, such as `Qwen/Qwen2.5-7B-Instruct`.

    Args:
        field: what the model's name was given as, for the error.

    Raises:
        ValueError: for a name that is not known and a folder without a configuration.
    """
    if Path(source).is_dir():
        return read_model_shape(Path(source))
    name = source.rsplit("/", 1)[-1].lower()
    known = [shape for shape in MODELS.values() if name.startswith(shape.name.lower())]
    if not known:
        raise ValueError(
            f"{field} is {source!r}, which is no folder here: give the folder of a Hugging Face model, of which its"
            f" config.json is enough, or one of {', '.join(MODELS)}"
        )
    return known[0]


def read_model_shape(folder: Path) -> ModelShape:
    """What latency depends on, from a Hugging Face model's `config.json`.

    Raises:
        ValueError: if the file is missing or lacks a field of a dense decoder.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} is missing: give the folder of a Hugging Face model")
    return model_shape(folder.name, json.loads(path.read_text()))
