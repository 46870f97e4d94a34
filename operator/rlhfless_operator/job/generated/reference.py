"""Generate docs/reference.md from the job's pydantic model."""

from functools import cache
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from rlhfless_functions.api.metrics import LEARNING_METRICS, PREPARATION_METRICS
from rlhfless_functions.settings import AlgorithmName, AlgorithmSettings, Money, Settings
from rlhfless_operator.job.generated.change_rules import CHANGE_RULES
from rlhfless_operator.job.generated.section_rules import SECTION_RULES
from rlhfless_operator.job.pods import KubernetesObject, Quantity
from rlhfless_operator.job.reading import familiar_names
from rlhfless_operator.job.reading.fields import DocumentField, Unit, fields_of, walk
from rlhfless_operator.job.rules import SPEC_RULES
from rlhfless_operator.job.spec import API_VERSION, KIND, RLHFJob
from rlhfless_operator.records.metric_catalogue import DRIVER_METRICS, EVALUATION_METRICS
from rlhfless_operator.records.record import StepRecord

_INTRODUCTION = f"""\
<!-- Made from the job's model; do not edit. -->

# Reference: the job document

A job is one YAML document, the same for `rlhfless run job.yaml` and for `kubectl apply -f job.yaml`:

```yaml
apiVersion: {API_VERSION}
kind: {KIND}
metadata:
  name: my-job
spec:
  model:
    source: ./model
  data:
    source: prompts.jsonl
  rewards:
    - name: right
      math: {{}}
  steps: 100
```

Names are in camelCase. A field that is not listed here is an error, and so is text in place of a number.
**Durations** are a number with a unit (`ms`, `s`, `m`, `h`, `d`), such as `30s`, `15m` or `1h30m`. **Memory** is a
number with a unit, such as `512Mi` or `16Gi`. **Prices** are decimal numbers in quotes, such as `"2.50"`.
**Quantities** are Kubernetes' own: a whole number, or text such as `"500m"` or `"16Gi"`. Paths are relative to the job
file, except for `artifacts.uri`. A model may also be a name on the Hugging Face hub: it is a path if it begins with
`.`, `/` or `~`, or exists.

An option that is **experimental** is off by default, and has not shown a gain on its target yet: GPUs, or a real
cluster. `rlhfless validate` names those that a document turns on.
"""
_METRICS_INTRODUCTION = """\
## Metrics

Each finished step adds a line to `metrics.jsonl` in the job's folder. Step 0 is the evaluation before training.
Trackers get the same values under other names: `metrics` becomes `train/`, `evaluation` becomes `eval/`, and `seconds/`
becomes `timing_s/`. A `share` is between 0 and 1. A name in angle brackets is a name from the job.
"""
_UNITS: dict[Unit, str] = {"duration": "duration", "bytes": "memory", "money": "price"}
_TYPES: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    str: "text",
    dict[str, str]: "mapping of text to text",
    dict[str, Quantity]: "mapping of text to quantity",
    dict[str, Money]: "mapping of text to price",
    KubernetesObject: "mapping, as in Kubernetes",
}
_LATER = " (`rlhfless validate` and the operator check this; the API server can't)"
_BY_NAME = "by `name`, see below"


def reference_markdown() -> str:
    """Return the reference page: every field with its type, default and meaning; rules; names in other frameworks."""
    parts = [_INTRODUCTION, "## Job\n\n" + _table(RLHFJob, ())]
    for path, field in walk(RLHFJob):
        if field.model is not None:
            parts.append(_section(path, field, field.model))
        if field.model is AlgorithmSettings:
            parts.append(_compositions())
    return "\n".join([*parts, _rules(), _names(), _metrics()])


def _metrics() -> str:
    """Return the part about the lines of `metrics.jsonl`."""
    fields = ["| Field | Meaning |", "|---|---|"]
    fields += [f"| `{name}` | {info.description} |" for name, info in StepRecord.model_fields.items()]
    sections = (
        ("metrics: of the samples", "Means over the step. An evaluation has the same.", PREPARATION_METRICS),
        ("metrics: of generation and its plan", "How the step ran.", DRIVER_METRICS),
        ("metrics: of learning", "A step has those of its algorithm.", LEARNING_METRICS),
        ("evaluation", "The metrics of samples above, on held-out prompts.", {"reward": EVALUATION_METRICS["reward"]}),
    )
    tables = "".join(
        f"### {title}\n\n{text}\n\n| Name | Unit | Meaning |\n|---|---|---|\n"
        + "".join(f"| `{name}` | {metric.unit} | {metric.meaning} |\n" for name, metric in metrics.items())
        + "\n"
        for title, text, metrics in sections
    )
    return f"{_METRICS_INTRODUCTION}\n" + "\n".join(fields) + f"\n\n{tables}".rstrip("\n") + "\n"


def _section(path: tuple[str, ...], field: DocumentField, model: type[BaseModel]) -> str:
    title = _title(path, field)
    text = " ".join((model.__doc__ or "").split())
    body = _table(model, path) if model.model_fields else "It has no fields: write `{}`.\n"
    return f"{'#' * min(2 + title.count('.'), 4)} {title}\n\n{text}\n\n{body}"


def _title(path: tuple[str, ...], field: DocumentField) -> str:
    return ".".join(path) + ("[]" if field.many else "")


def _table(model: type[BaseModel], path: tuple[str, ...]) -> str:
    rows = ["| Field | Type | Default | Meaning |", "|---|---|---|---|"]
    for field in fields_of(model).values():
        description = " ".join((field.info.description or "").split())
        cells = (f"`{field.name}`", _type(field, (*path, field.name)), _default(model, field), description)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _type(field: DocumentField, path: tuple[str, ...]) -> str:
    if field.model is not None:
        title = _title(path, field)
        anchor = title.replace(".", "").replace("[]", "").lower()
        return f"{'list of ' if field.many else ''}[{field.name}](#{anchor})"
    may_be_null = field.nullable and field.info.default is not None
    return _type_alone(field) + (" or `null`" if may_be_null else "")


def _type_alone(field: DocumentField) -> str:
    if field.choices:
        return ", ".join(f"`{choice}`" for choice in field.choices)
    if field.unit is not None:
        return _UNITS[field.unit]
    return ", ".join([f"{'list of ' if field.many else ''}{_TYPES[field.kind]}", *_bounds(field)])


def _bounds(field: DocumentField) -> list[str]:
    counted = "" if field.many else " characters"
    words = []
    for bound in field.constraints:
        match bound:
            case Ge(ge=limit):
                words.append(f"≥ {limit}")
            case Gt(gt=limit):
                words.append(f"> {limit}")
            case Le(le=limit):
                words.append(f"≤ {limit}")
            case Lt(lt=limit):
                words.append(f"< {limit}")
            case MinLen(min_length=limit) if field.many:
                words.append(f"at least {limit}")
            case MaxLen(max_length=limit):
                words.append(f"at most {limit}{counted}")
    return words


def _default(model: type[BaseModel], field: DocumentField) -> str:
    value = field.info.default
    if value is PydanticUndefined:
        return "**required**"
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None:
        if (written := _plain(model, field)) != "None":
            return f"`{written}`"
        filled_in = model is AlgorithmSettings and field.name in _composed()
        return _BY_NAME if filled_in else "none"
    return f"`{_plain(model, field)}`"


def _plain(model: type[BaseModel], field: DocumentField) -> str:
    """Return a default as a document would write it."""
    value = _schema(model)["properties"][field.name]["default"]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(value)}]"
    return (
        f'"{value}"'
        if field.unit == "money" and value is not None
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


@cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema(by_alias=True, mode="serialization")


def _composed() -> dict[str, str]:
    """Return the fields whose default depends on the algorithm's name: attributes by their names in a document."""
    whole = [AlgorithmSettings(name=name).resolved() for name in get_args(AlgorithmName)]
    return {
        field.name: attribute
        for attribute, field in zip(AlgorithmSettings.model_fields, fields_of(AlgorithmSettings).values(), strict=True)
        if attribute != "name" and len({_show(getattr(settings, attribute)) for settings in whole}) > 1
    }


def _compositions() -> str:
    names = get_args(AlgorithmName)
    whole = [AlgorithmSettings(name=name).resolved() for name in names]
    rows = ["| `name` | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for field, attribute in _composed().items():
        values = [_show(getattr(settings, attribute)) for settings in whole]
        rows.append(f"| `{field}` | " + " | ".join(values) + " |")
    return "Each algorithm's name sets these fields. A job may override each of them:\n\n" + "\n".join(rows) + "\n"


def _show(value: Any) -> str:
    if isinstance(value, Settings):
        return "its defaults"
    return "none" if value is None else f"`{to_jsonable_python(value)}`"


def _rules() -> str:
    sections: dict[type[BaseModel], str] = {}
    for path, field in walk(RLHFJob):
        if field.model in SECTION_RULES and field.model is not None:
            sections.setdefault(field.model, ".".join(path))
    always = [f"- `spec`: {rule.cel.message}{'' if rule.cel.expression else _LATER}" for rule in SPEC_RULES]
    always += [f"- `{sections[model]}`: {rule.message}" for model, rules in SECTION_RULES.items() for rule in rules]
    changes = [f"- `spec`: {rule.message}" for rule in CHANGE_RULES]
    return "\n".join(
        ["## Rules\n", *always, "\nOnce a job exists on a cluster:\n", *changes, ""],
    )


def _names() -> str:
    rows = ["| Here | In TRL, verl or OpenRLHF |", "|---|---|"]
    for ours, theirs in familiar_names.FIELDS.items():
        here = " and ".join(f"`{name.removeprefix('spec.')}`" for name in ours.split(" and "))
        rows.append(f"| {here} | {', '.join(f'`{name}`' for name in theirs)} |")
    rows.append(f"| `metadata.name` | {', '.join(f'`{name}`' for name in familiar_names.METADATA_NAMES)} |")
    return "## Names from elsewhere\n\nErrors about these names give the name here.\n\n" + "\n".join(rows) + "\n"
