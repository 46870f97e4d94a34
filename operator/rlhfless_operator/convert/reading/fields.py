"""Fields of a configuration as they were read."""

import re
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from rlhfless_operator.convert.conversion import Unknown
from rlhfless_operator.convert.shell import HOME, Unknowns
from rlhfless_operator.convert.shell.values import plain

Peer = Literal["trl", "verl", "openrlhf"]


class UnreadableConfigurationError(ValueError):
    """The file is not a configuration of a peer."""


@dataclass
class Configuration:
    """A configuration as it was read."""

    peer: Peer
    fields: dict[str, Any]
    """Values by name; dots separate nested names. A value that is known only when a script runs is an `Unknown`."""
    processes: int | None = None
    """Processes that it is launched with; None if the file does not say."""
    lost: dict[str, str] = field(default_factory=dict)
    """Parts of the file that have no field's name, and why they were not read."""


class _Loader(yaml.SafeLoader):
    """YAML as OmegaConf and Hydra read values: `1e-6` is a number, and `on`, `no` and `12:30` are text."""


_Loader.yaml_implicit_resolvers = {}
for tag, expression, first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|None|)$", "~nN\0"),
    ("int", r"^[-+]?[0-9][0-9_]*$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.?inf|\.?nan)$",
        "-+0123456789.in",
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(expression), list(first))


def load_yaml(text: str) -> Any:
    """Return the content of YAML, as OmegaConf reads it.

    Raises:
        yaml.YAMLError: it is no YAML.
    """
    return yaml.load(text, Loader=_Loader)


def value_of(text: str, unknowns: Unknowns, *, literal: bool = False) -> Any:
    """Return the value that a word of a command is: a number, a list, text, or an `Unknown`.

    Args:
        text: the word.
        unknowns: the reasons of its unknown parts.
        literal: whether it is text in any case.
    """
    reasons = unknowns.reasons(text)
    if reasons:
        return Unknown(plain(text, unknowns), "; ".join(reasons))
    if literal:
        return at_home(text)
    try:
        value = load_yaml(text)
    except yaml.YAMLError:
        value = text
    # `a: b` and `# a` are text to a command.
    return at_home(_spaced(value) if not isinstance(value, dict) or text.startswith("{") else text)


def _spaced(value: Any) -> Any:
    """Return a value of Hydra, whose mappings need no space after a colon: YAML reads `{a:1}` as the one name `a:1`."""
    if isinstance(value, list):
        return [_spaced(item) for item in value]
    if not isinstance(value, dict):
        return value
    found: dict[Any, Any] = {}
    for name, item in value.items():
        key, colon, rest = str(name).partition(":")
        found |= {key: load_yaml(rest)} if colon and item in ("", None) else {name: _spaced(item)}
    return found


def at_home(value: Any) -> Any:
    """Return a value with `~` for the home folder; unknown where it is not at the begin."""
    if isinstance(value, list):
        return [at_home(item) for item in value]
    if isinstance(value, dict):
        return {name: at_home(item) for name, item in value.items()}
    if not isinstance(value, str) or HOME not in value:
        return value
    written = value.replace(HOME, "~", 1) if value.startswith(HOME) else value
    if HOME in written:
        return Unknown(written.replace(HOME, "$HOME"), "$HOME is inside of it")
    return written
