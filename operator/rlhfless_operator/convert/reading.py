"""Read a peer's configuration: YAML, or a shell script with verl's `key=value` overrides."""

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

Peer = Literal["trl", "verl"]

_VERL_SECTIONS = {"actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function"}
_OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_ASSIGNMENT = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S.*?)\s*$", re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::-([^}]*))?\}|([A-Za-z_]\w*))")


class UnreadableConfigurationError(ValueError):
    """The file is not a configuration of a peer."""


def read_configuration(path: Path, peer: Peer | None = None) -> tuple[Peer, dict[str, Any]]:
    """Read a peer's configuration.

    Args:
        path: YAML, or text with overrides such as `data.train_batch_size=1024`.
        peer: the peer; None detects it by the names of fields.

    Returns:
        The peer, and the fields; dots separate verl's nested ones.

    Raises:
        UnreadableConfigurationError: the file is neither.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableConfigurationError(f"{path} can't be read ({error}); name a configuration file") from error
    overrides = None if path.suffix in (".yaml", ".yml") else _overrides(text)
    if overrides:
        if peer == "trl":
            raise UnreadableConfigurationError(f"{path} holds verl's overrides, not TRL's YAML; use --from verl")
        return "verl", overrides
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise UnreadableConfigurationError(f"{path} is not YAML ({problem}); check its indentation") from error
    if not isinstance(content, dict) or not content:
        raise UnreadableConfigurationError(f"{path} is not a configuration: it has no fields")
    content = {str(name): value for name, value in content.items()}
    if content.get("kind") == "RLHFJob":
        raise UnreadableConfigurationError(f"{path} is a job already; check it with rlhfless validate {path}")
    found: Peer = peer or ("verl" if _VERL_SECTIONS & content.keys() or _is_nested_data(content) else "trl")
    return found, dict(_flat(content)) if found == "verl" else content


def _is_nested_data(content: Mapping[str, Any]) -> bool:
    return isinstance(content.get("data"), dict) and "train_files" in content["data"]


def _flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}.")
        elif name not in ("_target_", "defaults") and value != {}:
            yield path, value


def _overrides(text: str) -> dict[str, Any]:
    """Find the fields on the command line in a shell script. Substitute the script's own variables."""
    text = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    variables: dict[str, str] = {}
    for name, value in _ASSIGNMENT.findall(text):
        variables[name] = _filled(value.strip("\"'"), variables)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError:
        words = text.split()
    found = {}
    for word in words:
        if (match := _OVERRIDE.fullmatch(word)) is not None:
            value = _filled(match[2], variables)
            try:
                found[match[1]] = yaml.safe_load(value)
            except yaml.YAMLError:
                found[match[1]] = value
    return found


def _filled(text: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] or match[0])

    return _VARIABLE.sub(value, text)
