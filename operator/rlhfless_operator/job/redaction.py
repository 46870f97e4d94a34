"""A job's document as strangers may see it: the model card, reports and trackers are passed on."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)(?:[^\s/?#@]*@)?(?P<place>[^\s?#]*)(?:\?(?P<query>[^\s#]*))?(?:#\S*)?"
)


def redacted(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a document without the pods' environment variables and templates, and without the credentials,
    queries and fragments of URLs."""
    return {name: _redacted(name, value, in_pods=False) for name, value in document.items()}


def without_credentials(text: str) -> str:
    """Return text whose URLs have no credentials: user names, passwords, queries and fragments."""
    return _URL.sub(lambda found: found["scheme"] + found["place"] + (f"?{HIDDEN}" if found["query"] else ""), text)


def _redacted(name: str, value: Any, *, in_pods: bool) -> Any:
    if in_pods and name == "env" and isinstance(value, Mapping):
        return dict.fromkeys(value, HIDDEN)
    if in_pods and name == "template":
        return HIDDEN
    if isinstance(value, Mapping):
        return {key: _redacted(key, child, in_pods=name == "pods") for key, child in value.items()}
    if isinstance(value, list):
        return [_redacted(name, child, in_pods=False) for child in value]
    return without_credentials(value) if isinstance(value, str) else value
