"""Sources of weights: a folder, a URI, or a name on the Hugging Face hub."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.store_errors import store_errors
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import ModelSettings
from rlhfless_functions.weights.support import check_supported

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken"]
_HUB_COPIES = ["original/*", "consolidated*"]
"""Files that hold the same weights again, in their makers' own format."""

# A function's standard error is its log, in which progress bars have no place.
logging.disable_progress_bar()


def weights_folder(uri: str, *, revision: str | None = None, verify: bool = True) -> Path:
    """Return the folder of weights or of a tokenizer on the local disk. It is checked against its manifest, if it has
    one.

    Args:
        uri: path or URI of a folder, published or the user's own, or a name on the hub.
        revision: branch, tag or commit, for a name on the hub.
        verify: whether to compare checksums.

    Raises:
        TaskError: it can't be had; the message names it and the remedy.
    """
    with store_errors():
        path = artifacts.local_path(uri)
        if path is None or path.is_dir() or not _HUB_NAME.fullmatch(uri):
            return artifacts.local_folder(uri, verify=verify, published=False)
    if path.exists():
        raise TaskError("model_unloadable", f"{uri} is a file: give the folder that holds config.json and the weights")
    try:
        return Path(snapshot_download(uri, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES))
    except Exception as error:
        raise TaskError(
            "model_unloadable",
            f"{uri} is no folder here, and the Hugging Face hub did not give it ({type(error).__name__}: {error});"
            " check the name, the network and HF_TOKEN, or give the path of a folder",
        ) from error


def arriving_folder(uri: str, model: ModelSettings) -> artifacts.Arriving:
    """Return the same folder while it is fetched, or while its checksums are compared.

    Raises:
        TaskError: as in `weights_folder`.
    """
    if artifacts.local_path(uri) is None:
        return artifacts.arrive(uri)
    folder = weights_folder(uri, revision=model_revision(model, uri), verify=False)

    def check(arriving: artifacts.Arriving) -> Path:
        arriving.begins(folder, [path.name for path in folder.iterdir()], all_there=True)
        return artifacts.local_folder(str(folder), published=False)

    return artifacts.Arriving(check)


@contextmanager
def checked_beside(uri: str, *, revision: str | None = None) -> Iterator[Path]:
    """Give the same folder at once, to build from it while its checksums are compared. A copy's checksums were compared
    when it was made.

    Raises:
        TaskError: as in `weights_folder`, at the latest at the end of the block. Then keep nothing that was built in
            it.
    """
    folder = weights_folder(uri, revision=revision, verify=False)
    with ThreadPoolExecutor(1) as thread:
        checked = thread.submit(weights_folder, str(folder))
        try:
            yield folder
        except TaskError:
            # A damaged file may also be one that can't be loaded.
            checked.result()
            raise
        checked.result()


def model_revision(model: ModelSettings, uri: str) -> str | None:
    """Return the hub revision of `uri`: the model's own, and only for the model itself."""
    return model.revision if uri == model.source else None


def load_config(uri: str, *, revision: str | None = None) -> PreTrainedConfig:
    """Return the configuration of a model folder.

    Raises:
        TaskError: there is none, or it can't be read.
    """
    return read_config(weights_folder(uri, revision=revision, verify=False), uri)


def read_config(folder: Path, uri: str) -> PreTrainedConfig:
    """Return the configuration in a local folder, which is a copy of `uri`.

    Raises:
        TaskError: there is none, it can't be read, or its model can't be trained.
    """
    with unloadable(uri, "give a Hugging Face folder with a config.json of an architecture that transformers knows"):
        # Without this, transformers asks on the terminal whether to run the folder's own code.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    config._name_or_path = uri  # Else a published adapter would name this machine's copy as its backbone.
    check_supported(config, uri)
    return config


@contextmanager
def unloadable(uri: str, remedy: str) -> Iterator[None]:
    """Turn any error of transformers about the content of `uri` into a TaskError.

    A damaged file of a published folder may have been read before its checksum was compared. Then the error names it.
    """
    try:
        yield
    except TaskError:
        raise
    except Exception as error:
        with store_errors():
            if (folder := artifacts.local_path(uri)) is not None and folder.is_dir():
                artifacts.local_folder(uri, published=False)
        problem = str(error).strip().split("\n")[0]
        raise TaskError(
            "model_unloadable", f"{uri} cannot be loaded ({type(error).__name__}: {problem}); {remedy}"
        ) from error
