"""The CustomResourceDefinition, generated from the job's pydantic model."""

from typing import Any

import yaml
from pydantic import BaseModel

from rlhfless_operator.job.generated.change_rules import CHANGE_RULES, FIXED_RULES
from rlhfless_operator.job.generated.section_rules import SECTION_RULES
from rlhfless_operator.job.resource_status import ResourceStatus
from rlhfless_operator.job.rule import CelRule
from rlhfless_operator.job.rules import SPEC_RULES
from rlhfless_operator.job.spec import API_VERSION, KIND, JobMetadata, RLHFJobSpec

Schema = dict[str, Any]

PLURAL = "rlhfjobs"
GROUP, VERSION = API_VERSION.split("/")
NAME = f"{PLURAL}.{GROUP}"

_COLUMNS = (
    ("Phase", "string", ".status.phase", 0),
    ("Stage", "string", ".status.stages", 0),
    ("Step", "string", ".status.progress", 0),
    ("Actors", "integer", ".status.actors", 0),
    ("Reward", "number", ".status.reward", 0),
    ("Cost", "string", ".status.cost", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Forecast", "string", ".status.forecast", 1),
    ("Budget", "string", ".status.budget", 1),
    ("Idle", "number", ".status.idleSeconds", 1),
    ("Reason", "string", ".status.reason", 1),
)
"""Name, type, path and priority of what `kubectl get` shows; priority 1 with `-o wide` only."""

_LONGEST_TEXT = 2**16
"""Most characters of a text whose field has no bound of its own."""

_KEPT = frozenset(
    {"type", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems", "allOf"}
    | {"x-kubernetes-list-type", "x-kubernetes-list-map-keys"}
)
"""Keywords that mean the same in pydantic's JSON Schema and in OpenAPI 3.0, and the API server's own keywords."""


def crd_yaml() -> str:
    """Return the CRD as a YAML file, with a comment that names the command which generates it."""
    header = "# Made by `rlhfless crd` from the job's model; do not edit.\n"
    text: str = yaml.safe_dump(crd(), sort_keys=False, width=120, allow_unicode=True)
    return header + text


def crd() -> dict[str, Any]:
    """Return the CRD as plain data."""
    columns = [
        {"name": name, "type": kind, "jsonPath": path, **({"priority": priority} if priority else {})}
        for name, kind, path, priority in _COLUMNS
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _resource()},
    }
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["rlhf"],
        "categories": ["all", "rlhfless"],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def _resource() -> Schema:
    name = JobMetadata.model_json_schema()["properties"]["name"]
    spec = structural_schema(RLHFJobSpec)
    spec["x-kubernetes-validations"] = _validations((*(rule.cel for rule in SPEC_RULES), *CHANGE_RULES))
    status = structural_schema(ResourceStatus, defaults=False)
    return {
        "type": "object",
        "description": "One training run: a language model trained by reinforcement learning.",
        "required": ["metadata", "spec"],
        "x-kubernetes-validations": _validations(FIXED_RULES),
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {key: name[key] for key in ("type", "pattern", "maxLength")}},
            },
            "spec": {"description": "The model, the data, the algorithm and the limits of the training.", **spec},
            "status": {"description": "The job's progress; the operator writes it.", **status},
        },
    }


def structural_schema(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """Convert a model to a structural schema: without references or unions, with OpenAPI 3.0's keywords.

    The schema omits a default of None, because the API server drops it anyway. A field is nullable only if None means
    something other than omitting the field.
    """
    # Only this mode writes defaults as a document does (30s, not 30.0). The two modes agree on everything else.
    whole = model.model_json_schema(by_alias=True, mode="serialization")
    rules = {section.__name__: _validations(cel) for section, cel in SECTION_RULES.items()}
    return _Converter(whole.get("$defs", {}), rules, defaults).convert(whole)


class _Converter:
    """The conversion of pydantic's JSON Schema."""

    def __init__(self, definitions: dict[str, Schema], rules: dict[str, list[Schema]], defaults: bool) -> None:
        self._definitions = definitions
        self._rules = rules
        self._defaults = defaults

    def convert(self, schema: Schema) -> Schema:
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            target = {**self._definitions[name], **{key: value for key, value in schema.items() if key != "$ref"}}
            converted = self.convert(target)
            if name in self._rules:
                converted["x-kubernetes-validations"] = self._rules[name]
            return converted
        if "x-kubernetes-int-or-string" in schema:
            return schema
        if "anyOf" in schema:
            return self._optional(schema)
        converted = {key: value for key, value in schema.items() if key in _KEPT}
        if "description" in schema:
            converted = {"description": " ".join(schema["description"].split()), **converted}
        if schema.get("type") == "string" and not {"enum", "maxLength", "const"} & schema.keys():
            converted["maxLength"] = _LONGEST_TEXT
        if "const" in schema:
            converted["enum"] = [schema["const"]]
        for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if bound in schema:
                converted |= {limit: schema[bound], bound: True}
        if self._defaults and schema.get("default") is not None:
            converted["default"] = _without_none(schema["default"])
        if required := schema.get("required"):
            converted["required"] = required
        if "properties" in schema:
            converted["properties"] = {name: self.convert(field) for name, field in schema["properties"].items()}
        if "items" in schema:
            converted["items"] = self.convert(schema["items"])
        if isinstance(values := schema.get("additionalProperties"), dict):
            converted["additionalProperties"] = self.convert(values)
        elif values is True:
            converted["x-kubernetes-preserve-unknown-fields"] = True
        return converted

    def _optional(self, schema: Schema) -> Schema:
        (kind,) = (option for option in schema["anyOf"] if option.get("type") != "null")
        rest = {key: value for key, value in schema.items() if key != "anyOf"}
        converted = self.convert({**kind, **rest})
        if schema.get("default") is not None:
            converted["nullable"] = True
        return converted


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return value


def _validations(rules: tuple[CelRule, ...]) -> list[Schema]:
    return [{"rule": rule.expression, "message": rule.message} for rule in rules if rule.expression is not None]
