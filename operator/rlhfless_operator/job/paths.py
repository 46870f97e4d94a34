"""Local paths in a job document: tell them from other strings, and resolve them.

A string with `://` or `::` is an fsspec URI. Any other string that names data or code is a path. A string that names a
model is a path if it starts with `.`, `/` or `~`, or exists; otherwise it is a name on the Hugging Face hub.
"""

from pathlib import Path

from rlhfless_functions.settings.data import HUB


def is_uri(text: str) -> bool:
    """Return whether this is no path: an fsspec URI such as `s3://bucket/data.jsonl`, or a `hub:` name of a dataset."""
    return "://" in text or "::" in text or text.startswith(HUB)


def is_template_text(text: str) -> bool:
    """Return whether this is a Jinja template itself, rather than the path of a file that holds one."""
    return "{{" in text or "{%" in text


def local_file(text: str, base: Path) -> Path | None:
    """Return the local path that names data or code; None for a URI."""
    return None if is_uri(text) else base.absolute() / _expanded(text)


def local_model(text: str, base: Path) -> Path | None:
    """Return the local folder that names a model; None for a URI or a name on the hub."""
    path = local_file(text, base)
    if path is None or text.startswith((".", "/", "~")) or exists(path):
        return path
    return None


def exists(path: Path) -> bool:
    """Return whether `path` exists; False for a name that no file can have."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _expanded(text: str) -> Path:
    path = Path(text)
    try:
        return path.expanduser()
    except RuntimeError:  # there is no such user
        return path


def resolve_file(text: str, base: Path) -> str:
    """Return `text` with a local path made absolute from `base`."""
    path = local_file(text, base)
    return text if path is None else str(path)


def resolve_model(text: str, base: Path) -> str:
    """Return `text` with a local model folder made absolute from `base`; a hub name stays."""
    path = local_model(text, base)
    return text if path is None else str(path)


def resolve_chat_template(text: str, base: Path) -> str:
    """Return `text` with the path of a template file made absolute from `base`; a template itself stays."""
    return text if is_template_text(text) else resolve_file(text, base)
