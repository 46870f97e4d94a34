"""docs/coming-from.md: its table names fields that exist here, there, and in what rlhfless recognizes."""

import re
from pathlib import Path

import pytest

from rlhfless_operator.convert.trl import ROWS as TRL
from rlhfless_operator.convert.verl import ROWS as VERL
from rlhfless_operator.job.reading import familiar_names
from rlhfless_operator.job.reading.fields import walk
from rlhfless_operator.job.spec import RLHFJob

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
TABLE = PAGE.read_text().partition("## Settings")[2].partition("\n## ")[0]
LINES = [
    [cell.strip(" `") for cell in line.strip("|").split("|")] for line in re.findall(r"^\| `.*$", TABLE, re.MULTILINE)
]
EVERYTHING = {theirs: ours for ours, names in familiar_names.FIELDS.items() for theirs in names}


def full_name(verl: str) -> str:
    return re.sub(r"^(actor|rollout)\.", r"actor_rollout_ref.\1.", verl)


@pytest.mark.parametrize(("ours", "trl", "verl", "openrlhf"), LINES, ids=lambda cell: cell or "-")
def test_each_line_of_the_table_names_fields_that_exist(ours: str, trl: str, verl: str, openrlhf: str) -> None:
    assert f"spec.{ours}" in {".".join(path) for path, _ in walk(RLHFJob)}
    assert not trl or trl in TRL
    assert not verl or full_name(verl) in VERL
    if openrlhf and openrlhf != ours.rpartition(".")[2]:
        assert ours in EVERYTHING[openrlhf]
