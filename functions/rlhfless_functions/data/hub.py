"""Datasets on the Hugging Face hub, through `datasets`: its cache, `HF_ENDPOINT`, `HF_TOKEN` and offline mode."""

import os
import re
from pathlib import Path
from typing import Any

from rlhfless_functions.data.rows import Row
from rlhfless_functions.data.sources import SourceError, choose_split
from rlhfless_functions.settings import MixedSource
from rlhfless_functions.settings.data import HUB

_COMMIT = re.compile(r"[0-9a-f]{40}")


def read_hub(reading: MixedSource) -> list[Row]:
    """Return the rows of a dataset on the hub, in their order.

    Raises:
        SourceError: it can't be had; the remedy says how to fetch it, or which configuration or split to name.
    """
    # Slow to import, and only needed for this source.
    from datasets import disable_progress_bars, get_dataset_config_names, get_dataset_split_names, load_dataset

    disable_progress_bars()
    name = reading.source.removeprefix(HUB)
    version: dict[str, Any] = {"revision": reading.revision}
    try:
        if not _offline() and reading.subset is None:
            _check_subset(name, get_dataset_config_names(name, **version))
        split = reading.split
        if split is None and not _offline():
            split = choose_split(get_dataset_split_names(name, reading.subset, **version), None, name)
        loaded = _pinned(
            load_dataset(name, reading.subset, split=split or "train", **version), reading, split or "train"
        )
    except SourceError:
        raise
    except Exception as error:
        raise _fault(reading, name, error) from error
    rows: list[Row] = loaded.with_format(None).to_list()
    return rows


def _pinned(loaded: Any, reading: MixedSource, split: str) -> Any:
    """Return a dataset at the commit that a job names: without a network, `datasets` takes the newest in its cache."""
    from datasets import Dataset, concatenate_datasets

    commit = reading.revision
    folders = {Path(file["filename"]).parent for file in loaded.cache_files}
    if commit is None or _COMMIT.fullmatch(commit) is None or {folder.name for folder in folders} == {commit}:
        return loaded
    beside = [folder.parent / commit for folder in folders]
    files = sorted(file for folder in beside for file in folder.glob(f"*-{split}*.arrow"))
    if not files:
        have = ", ".join(sorted(folder.name for folder in folders)) or "no version"
        raise ConnectionError(f"the cache has {have}, not revision {commit}")
    return concatenate_datasets([Dataset.from_file(str(file)) for file in files])


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _check_subset(name: str, subsets: list[str]) -> None:
    if len(subsets) > 1 and "default" not in subsets:
        raise SourceError(f"{name} has the configurations {', '.join(subsets)}", "set data.subset to one of them")


def _fault(reading: MixedSource, name: str, error: Exception) -> SourceError:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    arguments = ", ".join(
        repr(each) if key is None else f"{key}={each!r}"
        for key, each in ((None, name), (None, reading.subset), ("revision", reading.revision))
        if each is not None
    )
    fetch = f'python -c "from datasets import load_dataset; load_dataset({arguments})"'
    if _offline():
        return SourceError(
            f"{name} is not in this machine's cache, and HF_HUB_OFFLINE is set ({reason})",
            f"fetch it where there is a network, with the same HF_HOME: {fetch}",
        )
    if isinstance(error, ConnectionError) or "reach" in reason or "find cache" in reason:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        return SourceError(
            f"{name} can't be fetched: {endpoint} does not answer ({reason})",
            f"check the network or HF_ENDPOINT, or fetch it elsewhere with the same HF_HOME: {fetch}",
        )
    return SourceError(
        f"{name} can't be read from the hub ({reason})",
        "check the name, data.subset, data.split and data.revision, and HF_TOKEN if it is private",
    )
