"""Configurations of models on the Hugging Face hub: from its cache on this machine, or over the network.

The control plane has no `huggingface_hub`; these are the places and variables that it documents.
"""

import json
import os
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

_HUB = "https://huggingface.co"
_SECONDS = 10.0
_YES = ("1", "on", "yes", "true")


class HubUnavailableError(Exception):
    """The hub does not answer, or does not give this user such a model. The message says which."""


def cached_config(name: str, revision: str | None = None) -> dict[str, Any] | None:
    """Return the `config.json` that an earlier download has left; None if there is none, or it can't be read.

    Args:
        name: such as `Qwen/Qwen3-8B`.
        revision: branch, tag or commit; `main` if left out.
    """
    folder = _cache() / f"models--{name.replace('/', '--')}"
    wanted = revision or "main"
    try:
        pointer = folder / "refs" / wanted
        commit = pointer.read_text().strip() if pointer.is_file() else wanted
        content = json.loads((folder / "snapshots" / commit / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def fetched_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return the `config.json` on the hub. Blocks for at most 10 s if the hub does not answer.

    Raises:
        HubUnavailableError: it can't be had; the message says why.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _YES:
        raise HubUnavailableError("HF_HUB_OFFLINE is set")
    base = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    url = f"{base}/{urllib.parse.quote(name)}/resolve/{urllib.parse.quote(revision or 'main', safe='')}/config.json"
    token = os.environ.get("HF_TOKEN")
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            content = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        remedy = "; set HF_TOKEN to a token that may read it" if error.code in (401, 403) else ""
        raise HubUnavailableError(f"{base} answers {error.code}{remedy}") from error
    except urllib.error.URLError as error:
        raise HubUnavailableError(f"{base}: {error.reason}") from error
    except (OSError, ValueError) as error:
        raise HubUnavailableError(f"{base}: {error}") from error
    if not isinstance(content, dict):
        raise HubUnavailableError(f"{url} holds no JSON object")
    return content


def _cache() -> Path:
    """Return the folder in which the hub's library keeps its downloads."""
    if place := os.environ.get("HF_HUB_CACHE"):
        return Path(place)
    home = os.environ.get("HF_HOME")
    if home is None:
        caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        home = f"{caches}/huggingface"
    return Path(home) / "hub"
