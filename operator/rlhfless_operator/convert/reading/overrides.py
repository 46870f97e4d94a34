"""verl's fields: `name=value` on a command line, and nested YAML."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhfless_operator.convert.conversion import Unknown
from rlhfless_operator.convert.reading.fields import Configuration, value_of
from rlhfless_operator.convert.shell import Unknowns
from rlhfless_operator.convert.shell.values import is_known, plain

SECTIONS = (
    "actor_rollout_ref", "algorithm", "trainer", "critic", "reward_model", "custom_reward_function", "reward", "data",
    "global_profiler", "ray_kwargs", "ray_init", "transfer_queue", "async_training", "rollout", "global_batch_size",
)  # fmt: skip
OVERRIDE = re.compile(r"(\+{1,2}|~)?([A-Za-z_]\w*(?:[./@][\w-]+)*)(?:=(.*))?", re.DOTALL)


def is_override(word: str) -> bool:
    """Return whether a word sets one of verl's fields."""
    match = OVERRIDE.fullmatch(word)
    return match is not None and match[3] is not None and "." in match[2] and match[2].split(".")[0] in SECTIONS


def read_overrides(words: Sequence[str], unknowns: Unknowns) -> Configuration:
    """Return the fields that the words of a command set, of which the last of a name counts."""
    found = Configuration("verl", {})
    words = list(words)
    while words:
        word = words.pop(0)
        match = OVERRIDE.fullmatch(word)
        if word.startswith("--config"):
            name, mark, value = word.partition("=")
            value = value if mark else words.pop(0) if words else ""
            found.fields[name.replace("-", "_").lstrip("_")] = value_of(value, unknowns)
        elif match is not None and match[1] == "~":
            found.lost[word] = "a field that is deleted is not left out here: look at what was written for it"
        elif match is not None and match[3] is not None:
            found.fields.update(nested(match[2], value_of(match[3], unknowns)))
        elif not is_known(word):
            reason = "; ".join(unknowns.reasons(word))
            found.lost[plain(word, unknowns)] = f"it may set fields, and is known only when the script runs: {reason}"
        elif "=" in word or not word.startswith("-"):
            found.lost[plain(word, unknowns)] = "it is no override that is read"
    return found


def nested(name: str, value: Any) -> dict[str, Any]:
    """Return the fields of a value: a mapping sets those below its name."""
    if isinstance(value, Mapping) and value:
        return dict(flat(value, f"{name}."))
    return {name: whole(value)}


def whole(value: Any) -> Any:
    """Return a value; one with an unknown part is unknown."""
    parts = list(_unknown_parts(value))
    if not parts or isinstance(value, Unknown):
        return value
    return Unknown(", ".join(part.text for part in parts), "; ".join(dict.fromkeys(part.reason for part in parts)))


def _unknown_parts(value: Any) -> Iterator[Unknown]:
    if isinstance(value, Unknown):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _unknown_parts(item)


def flat(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return nested fields with dots in their names."""
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from flat(value, f"{path}.")
        elif name not in ("_target_", "defaults") and value != {}:
            yield path, whole(value)


_REFERENCE = re.compile(r"\$\{(oc\.select:|oc\.env:)?([^${},]*)(?:,([^${}]*))?\}")


def interpolated(fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Replace OmegaConf's `${name}` by the value of that field; what is not a field's name is unknown."""

    def resolve(name: str, value: Any, depth: int = 0) -> Any:
        if isinstance(value, list):
            return whole([resolve(name, item, depth) for item in value])
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _REFERENCE.search(value)
        if match is None or depth > 20:
            return Unknown(value, "what it refers to is no field")
        target = _absolute(match[2], name)
        known = {**defaults, **fields}
        if match[1] != "oc.env:" and target in known:
            found = resolve(target, known[target], depth + 1)
        elif match[3] is not None:
            found = value_of(match[3].strip(), Unknowns())
        else:
            return Unknown(value, f"{target} is set where it runs" if match[1] else f"{target} is no field of it")
        if isinstance(found, Unknown) or match[0] == value:
            return found
        return resolve(name, value.replace(match[0], "" if found is None else str(found), 1), depth + 1)

    return {name: resolve(name, value) for name, value in fields.items()}


def _absolute(target: str, name: str) -> str:
    dots = len(target) - len(target.lstrip("."))
    parents = name.split(".")[: -dots or None]
    return ".".join([*parents, target.lstrip(".")]) if dots else target
