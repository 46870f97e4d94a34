"""The start of vLLM while its first weights are fetched, or while their checksums are compared.

vLLM often takes longer to start than the weights to arrive: imports, configuration, building the model. For that it
needs the model's small files. A loader gives it the tensors, and waits for one file after the other. No file is read
before it is complete and checked, unless it was on this machine before.
"""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PretrainedConfig

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, ModelSettings
from rlhfless_functions.weights.arriving_files import ArrivingFiles
from rlhfless_functions.weights.source import arriving_folder, unloadable
from rlhfless_functions.weights.support import check_weights_format
from rlhfless_functions.weights.tensors import layout, safetensors_files

logger = logging.getLogger(__name__)

_LOAD_FORMAT = "rlhfless"


class ArrivingWeights:
    """The first weights of an engine. The constructor begins to fetch or to check them.

    Args:
        uri: the folder of the weights.
        model: the job's model.

    Raises:
        TaskError: they cannot be had.
    """

    def __init__(self, uri: str, model: ModelSettings) -> None:
        self._uri = uri
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._files: list[str] = []
        with store_errors():
            self._arriving = arriving_folder(uri, model)
            names = self._arriving.names()
            if names and not self._arriving.all_there:
                self._copy = tempfile.TemporaryDirectory(prefix="rlhfless-vllm-")
                self.folder = self._small_files(names, Path(self._copy.name))
            elif names:
                self.folder = self._arriving.read(lambda folder: folder)
            else:
                self.folder = self._arriving.result()

    @property
    def is_whole(self) -> bool:
        """Whether the folder has all files."""
        return self._copy is None

    def prepare(self, config: PretrainedConfig, settings: EngineSettings) -> None:
        """Wait until vLLM can start. The weights may then be in another folder.

        Args:
            config: configuration of the weights.
            settings: the job's engine settings.

        Raises:
            TaskError: the weights cannot be had.
        """
        if self.is_whole:
            return
        with store_errors():
            if (why := self._why_whole(config, settings)) is not None:
                logger.info("vLLM starts once it has all of %s: %s", self._uri, why)
                self.folder = self._arriving.result()
                self.close()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments with which vLLM loads these weights."""
        if self.is_whole:
            return {}
        _register_loader(self._arriving, self._files)
        return {"load_format": _LOAD_FORMAT}

    def complete(self) -> Path:
        """Return the whole folder, checked. Results computed with the weights may then be used.

        Raises:
            TaskError: the weights cannot be had.
        """
        with store_errors():
            return self._arriving.result()

    def check_why(self, error: Exception) -> None:
        """Raise the weights' own error, if it is the reason that vLLM did not start.

        Args:
            error: error of the start.

        Raises:
            TaskError: the weights cannot be had.
        """
        if self.is_whole or self._arriving.failed:
            try:
                self.complete()
            except TaskError as reason:
                raise reason from error

    def close(self) -> None:
        """Record that vLLM has started, or never will."""
        if self._copy is not None:
            self._copy.cleanup()
            self._copy = None

    def _small_files(self, names: frozenset[str], place: Path) -> Path:
        for name in names:
            if not name.endswith(".safetensors"):
                self._arriving.wait_for(name)
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                self._arriving.read(lambda folder: shutil.copyfile(folder / name, place / name))  # noqa: B023
        return place

    def _why_whole(self, config: PretrainedConfig, settings: EngineSettings) -> str | None:
        """Return the reason why vLLM needs all files at once; None if it does not."""
        if settings.vllm.tensor_parallel_size > 1:
            return "its workers are other processes"
        if any(name.lstrip("-").replace("-", "_") == "load_format" for name in settings.vllm.extra_args):
            return "generation.vllm.extraArgs chooses how it loads"
        if settings.vllm.quantization is not None or getattr(config, "quantization_config", None) is not None:
            return "it derives the kind of quantization from all tensors"
        try:
            files = ArrivingFiles(self._arriving)
        except artifacts.ArtifactError:
            raise
        except Exception as error:
            return f"its files are unusual ({error})"
        if getattr(config, "tie_word_embeddings", False) and any(
            name.endswith("lm_head.weight") for name in files.file_of
        ):
            return "it compares the output layer with the embedding"
        self._files = sorted(set(files.file_of.values()))
        return None


def layout_of(folder: Path, uri: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a checkpoint, by its name.

    Raises:
        TaskError: it has no safetensors files, or others than its index names.
    """
    check_weights_format(folder, uri)
    with unloadable(uri, "give a folder of safetensors weights that belong to its config.json"):
        return layout(safetensors_files(folder))


def _register_loader(arriving: artifacts.Arriving, files: list[str]) -> None:
    """Teach vLLM to load a model from files that arrive. A start of vLLM uses the loader that was registered last.

    Args:
        arriving: the folder.
        files: names of the files with tensors.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    class ArrivingLoader(DefaultModelLoader):
        def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
            return _tensors(arriving, files)

        def download_model(self, model_config: Any) -> None:
            pass

    register_model_loader(_LOAD_FORMAT)(ArrivingLoader)


def _tensors(arriving: artifacts.Arriving, files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        arriving.wait_for(file)
        with arriving.read(lambda folder: safe_open(folder / file, framework="pt", device="cpu")) as tensors:  # noqa: B023
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                yield name, tensors.get_tensor(name)
