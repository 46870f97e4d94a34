"""The CRD: a structural schema made from the job's model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from rlhfless_operator.job.generated.change_rules import CHANGE_RULES, FIXED_RULES
from rlhfless_operator.job.generated.crd import crd, crd_yaml
from rlhfless_operator.job.generated.section_rules import SECTION_RULES
from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.resource_status import ResourceStatus
from rlhfless_operator.job.rules import SPEC_RULES
from rlhfless_operator.job.spec import RLHFJob, RLHFJobSpec
from tests.jobs import document

REPOSITORY = Path(__file__).resolve().parents[3]
FILE = REPOSITORY / "crds" / "rlhfjobs.rlhfless.io.yaml"

(VERSION,) = crd()["spec"]["versions"]
RESOURCE = VERSION["schema"]["openAPIV3Schema"]
SPEC = RESOURCE["properties"]["spec"]
STATUS = RESOURCE["properties"]["status"]


def schemas(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """A schema and everything in it."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from schemas(inner, (*path, name))
    if "items" in schema:
        yield from schemas(schema["items"], (*path[:-1], f"{path[-1]}[]"))


def at(path: str) -> dict[str, Any]:
    return dict(schemas(SPEC))[tuple(path.split("."))]


def test_the_file_in_the_repository_is_up_to_date() -> None:
    assert FILE.read_text() == crd_yaml(), "run: make docs"


def test_the_yaml_says_what_the_data_says() -> None:
    assert yaml.safe_load(crd_yaml()) == crd()


def test_names_are_those_that_users_type() -> None:
    names = crd()["spec"]["names"]
    assert crd()["metadata"]["name"] == "rlhfjobs.rlhfless.io"
    assert (names["kind"], names["plural"], names["shortNames"]) == ("RLHFJob", "rlhfjobs", ["rlhf"])
    assert names["categories"] == ["all", "rlhfless"]
    assert VERSION["subresources"] == {"status": {}}


def test_the_schema_is_structural() -> None:
    allowed = {
        "description", "type", "properties", "required", "items", "additionalProperties", "default", "nullable", "enum",
        "pattern", "allOf", "minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "x-kubernetes-validations", "x-kubernetes-preserve-unknown-fields",
        "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    }  # fmt: skip
    for path, schema in schemas(RESOURCE):
        assert set(schema) <= allowed, path
        assert isinstance(schema["type"], str), path


def test_it_has_exactly_the_fields_of_the_model() -> None:
    found = {path for path, _ in schemas(SPEC) if path and not path[-1].endswith("[]")}
    assert found == {path for path, _ in walk(RLHFJobSpec)}
    assert {path for path, _ in schemas(STATUS) if path and not path[-1].endswith("[]")} == {
        path for path, _ in walk(ResourceStatus)
    }


def test_every_field_says_what_it_is() -> None:
    for path, schema in schemas(SPEC):
        if not path or not path[-1].endswith("[]"):
            assert schema.get("description", "").strip(), path


def test_types_bounds_and_choices_are_the_models() -> None:
    assert at("batch.promptsPerStep").items() >= {"type": "integer", "minimum": 1, "default": 64}.items()
    assert at("optimizer.learningRate").items() >= {"minimum": 0, "exclusiveMinimum": True, "default": 1e-6}.items()
    assert at("algorithm.name")["enum"][:2] == ["ppo", "grpo"]
    assert at("generation.keepAlive")["default"] == "auto"
    assert at("rewards[].memory")["default"] == "4Gi"
    assert at("prices.instanceHour").items() >= {"type": "string", "default": "0"}.items()
    assert SPEC["required"] == ["model", "rewards", "data"]
    assert at("rewards").items() >= {"type": "array", "minItems": 1, "maxItems": 32}.items()


def test_null_is_kept_only_where_it_differs_from_leaving_the_field_out() -> None:
    nullable = {".".join(path) for path, schema in schemas(SPEC) if schema.get("nullable")}
    assert nullable == {"algorithm.critic.valueClip"}
    assert all(schema["default"] is not None for _, schema in schemas(SPEC) if "default" in schema)


def test_the_defaults_are_the_models() -> None:
    smallest = document()["spec"]
    filled = fill_in(SPEC, smallest)
    assert RLHFJobSpec.model_validate(filled, by_name=False) == RLHFJobSpec.model_validate(smallest)
    assert filled["learning"]["keepAlive"] == "auto"


def fill_in(schema: dict[str, Any], value: Any) -> Any:
    """Defaults as the API server fills them in: from the top."""
    if isinstance(value, dict):
        fields = schema.get("properties", {})
        whole = {name: field["default"] for name, field in fields.items() if "default" in field} | value
        return {name: fill_in(fields[name], part) for name, part in whole.items()}
    if isinstance(value, list):
        return [fill_in(schema["items"], part) for part in value]
    return value


def test_the_defaults_satisfy_the_schema() -> None:
    for _, schema in schemas(SPEC):
        if "default" in schema:
            # OpenAPI 3.0 writes an exclusive bound as a flag, which this draft of JSON Schema shares.
            jsonschema.Draft4Validator(schema).validate(schema["default"])


@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*/*.yaml")), ids=lambda path: path.stem)
def test_the_examples_satisfy_the_schema(example: Path) -> None:
    jsonschema.Draft4Validator(RESOURCE).validate(yaml.safe_load(example.read_text()))


def test_every_rule_is_there_for_the_api_server() -> None:
    def rules(schema: dict[str, Any]) -> list[str]:
        return [rule["rule"] for rule in schema.get("x-kubernetes-validations", [])]

    assert rules(RESOURCE) == [rule.expression for rule in FIXED_RULES]
    assert rules(SPEC) == [
        *(rule.cel.expression for rule in SPEC_RULES if rule.cel.expression is not None),
        *(rule.expression for rule in CHANGE_RULES),
    ]
    models = {".".join(path) + ("[]" if field.many else ""): field.model for path, field in walk(RLHFJobSpec)}
    expected = {
        path: [rule.expression for rule in SECTION_RULES[model]]
        for path, model in models.items()
        if model in SECTION_RULES
    }
    assert {".".join(path): rules(schema) for path, schema in schemas(SPEC) if path and rules(schema)} == expected


def test_columns_show_fields_of_the_status() -> None:
    known = {f".status.{path[0]}" for path, _ in walk(ResourceStatus) if len(path) == 1} | {
        ".metadata.creationTimestamp"
    }
    assert {column["jsonPath"] for column in VERSION["additionalPrinterColumns"]} <= known
    wide = [column["name"] for column in VERSION["additionalPrinterColumns"] if column.get("priority")]
    assert wide == ["Forecast", "Budget", "Idle", "Reason"]


def test_conditions_are_a_map_by_type() -> None:
    conditions = STATUS["properties"]["conditions"]
    assert (conditions["x-kubernetes-list-type"], conditions["x-kubernetes-list-map-keys"]) == ("map", ["type"])
    assert conditions["items"]["required"] == ["type", "status"]


def test_the_jobs_name_is_bounded_by_the_server_too() -> None:
    name = RESOURCE["properties"]["metadata"]["properties"]["name"]
    assert name["maxLength"] == 53
    assert "apiVersion" in RLHFJob.model_json_schema(by_alias=True)["required"]
