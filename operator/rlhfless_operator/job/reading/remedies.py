"""Messages for wrong fields: the fault, and the remedy."""

import difflib
import re
from typing import Any

from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from rlhfless_operator.job.reading import familiar_names, familiar_values
from rlhfless_operator.job.reading.fields import DocumentField, Path, Unit, fields_of, model_at, show_path, walk
from rlhfless_operator.job.reading.yaml_document import value_at
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob

Advice = tuple[str, str]
"""The fault, and the remedy."""

UNIT_REMEDIES: dict[Unit, str] = {
    "duration": "write a number with its unit, such as 30s, 15m or 1h30m",
    "bytes": "write a number with its unit, such as 512Mi or 16Gi",
    "money": 'write a decimal number in quotes, such as "2.50"',
}
_REWARD_NAME = "use lower-case letters, digits, _ and -, with a letter or digit at both ends"
_REWARD_URL = "begin it with http:// or https://"
PATTERN_REMEDIES = {
    "metadata.name": "use lower-case letters, digits and hyphens, with a letter or digit at both ends",
    "spec.rewards.name": _REWARD_NAME,
    "spec.rewards.http.url": _REWARD_URL,
    "spec.evaluation.rewards.name": _REWARD_NAME,
    "spec.evaluation.rewards.http.url": _REWARD_URL,
    "spec.environment.openenv.url": "write the server's address, such as http://maze.environments:8000",
    "spec.environment.served.url": "write the server's address, such as http://counter.environments:8000",
    "spec.environment.tools": "write the file and its function, such as search.py:search",
    "spec.prices.currency": "write three capital letters, such as EUR",
}
"""The remedy for each pattern, by the field's path without list positions."""

_UNIT_NAMES: dict[Unit, str] = {"duration": "a duration", "bytes": "an amount of memory", "money": "a price"}
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}
_LIMITS = {
    "greater_than": ("gt", "write more than {}"),
    "greater_than_equal": ("ge", "write at least {}"),
    "less_than": ("lt", "write less than {}"),
    "less_than_equal": ("le", "write at most {}"),
    "string_too_short": ("min_length", "write at least {} characters"),
    "string_too_long": ("max_length", "write at most {} characters"),
    "too_short": ("min_length", "write at least {}"),
    "too_long": ("max_length", "write at most {}"),
}
_ABOUT_FIELD = re.compile(r"([A-Za-z][A-Za-z.]*): (.*)", re.DOTALL)
_REFERENCE = "see docs/reference.md"


def unknown_field(path: Path, content: Any = None) -> Advice:
    """Return the advice for a name that is not a field of its section.

    Args:
        path: the path of the unknown name.
        content: the whole document, which is needed to convert values of other frameworks.
    """
    name, model = str(path[-1]), model_at(RLHFJob, path[:-1])
    if near := intended_sibling(path, cutoff=0.85):
        return "unknown field", f"did you mean {near}?"
    spec = value_at(content, ("spec",))
    if remedy := familiar_values.what_to_write(name, value_at(content, path), spec if isinstance(spec, dict) else {}):
        return "unknown field", remedy
    if ours := familiar_names.our_field(name):
        return "unknown field", f"it is {ours} here"
    if reason := familiar_names.reason_for_absence(name):
        return "unknown field", f"remove it: {reason}"
    if places := _places(name):
        return "unknown field", f"it belongs to {' or '.join(places)}"
    if near := intended_sibling(path):
        return "unknown field", f"did you mean {near}?"
    known = ", ".join(fields_of(model)) if model else ""
    return "unknown field", f"known here: {known}" if known else "remove it"


def intended_sibling(path: Path, cutoff: float = 0.7) -> str | None:
    """Return the field that the user most likely meant by an unknown name."""
    name, model = str(path[-1]), model_at(RLHFJob, path[:-1])
    siblings = list(fields_of(model)) if model else []
    if name in siblings:
        return None
    by_letters = {sibling.lower(): sibling for sibling in siblings}
    letters = name.replace("_", "").replace("-", "").lower()
    close = difflib.get_close_matches(letters, by_letters, n=1, cutoff=cutoff)
    return by_letters[close[0]] if close else None


def missing_field(path: Path) -> Advice:
    """Return the advice for a missing required field."""
    if len(path) == 1 and path[0] in ("apiVersion", "kind"):
        return "missing", f"write {path[0]}: {API_VERSION if path[0] == 'apiVersion' else KIND}"
    field = _field(path)
    described = (field.info.description or "").split(". ")[0].rstrip(".") if field else ""
    return "missing", f"add it: {' '.join(described.split())}"


def number_without_unit(path: Path, value: Any) -> Advice:
    """Return the advice for a duration, an amount of memory or a price that is a bare number."""
    unit = unit_at(path)
    if unit == "money":
        return f"{show_value(value)} is a binary number, which can't hold exact decimals", UNIT_REMEDIES["money"]
    return f"{show_value(value)} has no unit", UNIT_REMEDIES[unit] if unit else _REFERENCE


def broken_rule(path: Path, text: str) -> tuple[Path, Advice]:
    """Return the advice of a message from a model's validator, which may begin with a field's name below `path`."""
    match = _ABOUT_FIELD.fullmatch(text)
    model = model_at(RLHFJob, path)
    if match and model and match[1].split(".")[0] in fields_of(model):
        path, text = (*path, *match[1].split(".")), match[2]
    message, _, remedy = text.rpartition("; ")
    if message:
        return path, (message, remedy)
    message, _, remedy = text.partition(": write ")
    if remedy:
        return path, (message, f"write {remedy}")
    unit = unit_at(path)
    return path, (message, UNIT_REMEDIES[unit] if unit else _REFERENCE)


def wrong_value(path: Path, details: ErrorDetails) -> Advice:
    """Return the advice for a value that pydantic refuses."""
    kind, value, field = details["type"], details["input"], _field(path)
    context: dict[str, Any] = details.get("ctx", {})
    if kind == "literal_error" and field:
        return f"{show_value(value)} is not a choice", _choose(value, field.choices)
    if (unit := unit_at(path)) and not (field and field.many):
        return f"{show_value(value)} is not {_UNIT_NAMES[unit]}", UNIT_REMEDIES[unit]
    if kind in _TYPES:
        return _wrong_type(value, _TYPES[kind], model_at(RLHFJob, path) if kind == "model_type" else None)
    if kind in _LIMITS:
        name, text = _LIMITS[kind]
        return f"{show_value(value)} is out of bounds", text.format(f"{context[name]:g}")
    if kind == "string_pattern_mismatch":
        place = show_path(tuple(part for part in path if isinstance(part, str)))
        return f"{show_value(value)} is not allowed", PATTERN_REMEDIES[place]
    return f"{show_value(value)}: {details['msg']}", _REFERENCE


def show_value(value: Any) -> str:
    """Return a value as a document would write it, truncated."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "an empty list" if not value else f"a list of {len(value)}"
    if isinstance(value, str):
        return f'"{value[:60]}…"' if len(value) > 60 else f'"{value}"'
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)


def _wrong_type(value: Any, wanted: str, model: Any) -> Advice:
    if value is None:
        return f"empty, but {wanted} is expected", "fill it in, or remove the line"
    if wanted == "a finite number":
        return f"{value} is not finite", "write an ordinary number"
    message = f"{show_value(value)} is {_type_name(value)}, not {wanted}"
    if isinstance(value, str) and _looks_like(value, wanted):
        return message, "remove the quotes"
    if wanted == "text" and not isinstance(value, dict | list):
        return message, f'put it in quotes: "{show_value(value)}"'
    if wanted == "a list":
        return message, "write one item per line, each after a hyphen"
    if wanted == "a mapping" and model is not None:
        return message, f"write fields below it: {', '.join(list(fields_of(model))[:4])} …"
    if wanted == "a whole number" and isinstance(value, float):
        return message, f"write {value:.0f}" if abs(value) < 1e15 else "write a smaller number"
    return message, f"write {wanted}"


def _looks_like(text: str, wanted: str) -> bool:
    if wanted == "true or false":
        return text in ("true", "false")
    pattern = {"a whole number": r"[-+]?\d+", "a number": r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"}.get(wanted)
    return pattern is not None and re.fullmatch(pattern, text) is not None


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a fraction" if value % 1 else "a number with a decimal point or an exponent"
    if isinstance(value, str):
        return "text"
    return "of another kind"


def _choose(value: Any, choices: tuple[Any, ...]) -> str:
    if len(choices) == 1:
        return f"write {choices[0]}"
    listed = f"{', '.join(map(str, choices[:-1]))} or {choices[-1]}"
    if isinstance(value, str):
        ours = familiar_names.our_choice(value, choices)
        close = difflib.get_close_matches(value.lower().replace("_", "-"), choices, n=1, cutoff=0.6)
        close = close or difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.6)
        if ours or close:
            return f"did you mean {ours or close[0]}? One of {listed}"
    return f"write {listed}"


def _field(path: Path) -> DocumentField | None:
    """Return the field at `path`; for a list's item, the list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    model = model_at(RLHFJob, path[:-1]) if path else None
    return fields_of(model).get(str(path[-1])) if model else None


def unit_at(path: Path) -> Unit | None:
    """Return the unit of the value at `path`, which may be a value of a mapping."""
    if field := _field(path):
        return field.unit
    mapping = _field(path[:-1])
    return mapping.unit_of_each if mapping else None


def _places(name: str) -> list[str]:
    """Return the sections that have a field of this name, if they are few."""
    wanted = (name, to_camel(name))
    found = [".".join(path[:-1]) for path, field in walk(RLHFJob) if field.name in wanted and len(path) > 1]
    return found if len(found) <= 3 else []
