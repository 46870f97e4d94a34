"""docs/reference.md: every field of the job, made from its model."""

import functools
import re
from pathlib import Path

from pydantic_core import PydanticUndefined

from rlhfless_operator.job.generated.reference import reference_markdown
from rlhfless_operator.job.reading import familiar_names
from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.reading.validation import parse_job
from rlhfless_operator.job.spec import RLHFJob

REPOSITORY = Path(__file__).resolve().parents[3]
FILE = REPOSITORY / "docs" / "reference.md"


@functools.cache
def page() -> str:
    return reference_markdown()


def row(section: str, field: str) -> list[str]:
    """Type, default and meaning of a field."""
    table = re.search(rf"^#+ {re.escape(section)}\n(.*?)(?=^#|\Z)", page(), re.MULTILINE | re.DOTALL)
    assert table, section
    found = re.search(rf"^\| `{re.escape(field)}` \| (.*) \|$", table[1], re.MULTILINE)
    assert found, f"{section}.{field}"
    return found[1].split(" | ")


def test_the_page_in_the_repository_is_up_to_date() -> None:
    assert FILE.read_text() == page(), "run: make docs"


def test_every_field_is_on_the_page_with_its_meaning() -> None:
    for path, field in walk(RLHFJob):
        kind, default, meaning = row(".".join(path[:-1]) or "Job", path[-1])
        assert kind
        assert (default == "**required**") == (field.info.default is PydanticUndefined)
        assert meaning.endswith((".", "left out.")), path


def test_types_say_their_unit_and_their_bounds() -> None:
    assert row("spec.limits", "stall")[:2] == ["duration", "`2m`"]
    assert row("spec.rewards[]", "memory")[:2] == ["memory", "`4Gi`"]
    assert row("spec.prices", "instanceHour")[:2] == ["price", '`"0"`']
    assert row("spec.batch", "promptsPerStep")[:2] == ["whole number, ≥ 1", "`64`"]
    assert row("spec.planning", "lambda")[:2] == ["number, ≥ 0, ≤ 1", "`0.5`"]
    assert row("spec.model", "dtype")[:2] == ["`float32`, `bfloat16`", "`bfloat16`"]
    assert row("spec.sampling", "stop")[:2] == ["list of text, at most 16", "`[]`"]
    assert row("spec.checkpoints", "best")[:2] == ["`true` or `false`", "`false`"]
    assert row("spec.algorithm.importanceSampling", "high")[:2] == ["number, > 0", "`2`"]
    assert row("spec.algorithm.critic", "valueClip")[:2] == ["number, > 0 or `null`", "`0.2`"]
    assert row("metadata", "name")[:2] == ["text, at most 53 characters", "**required**"]


def test_what_an_algorithms_name_stands_for_is_a_table() -> None:
    assert row("spec.algorithm", "clipHigh")[1] == "by `name`, see below"
    assert "| `advantage` | `gae` | `group` | `leave_one_out` | `discounted` |" in page()


def test_every_link_leads_to_a_heading() -> None:
    headings = re.findall(r"^#+ (.*)$", page(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(#([^)]*)\)", page())) <= anchors


def test_the_example_on_the_page_is_a_job() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", page(), re.DOTALL)
    assert parse_job(example).spec.steps == 100


def test_names_from_elsewhere_are_listed() -> None:
    for names in familiar_names.FIELDS.values():
        assert all(f"`{name}`" in page() for name in names)
