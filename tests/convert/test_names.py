"""A name of TRL's or verl's leads to the same section in a hint about an unknown field and in a conversion."""

from collections.abc import Mapping
from typing import Any

import pytest

from rlhfless_operator.convert.conversion import Row, Theirs, Unneeded
from rlhfless_operator.convert.trl import ROWS as TRL
from rlhfless_operator.convert.verl import ROWS as VERL
from rlhfless_operator.job.reading.familiar_names import our_field

ELSEWHERE = {
    "bf16": "TRL computes in bfloat16, with weights in float32; a document that has it means the weights",
    "actor_rollout_ref.model.path": "the end of the name, which a hint knows, is that of several fields",
    "reward.custom_reward_function.path": "the end of the name, which a hint knows, is that of several fields",
    "critic.optim.lr": "the end of the name, which a hint knows, is that of several fields",
}
"""Fields whose hint names another section, and the reason."""

PLACES = [(rows, name) for rows in (TRL, VERL) for name in rows if our_field(name) and name not in ELSEWHERE]


def section(field: str) -> str:
    """The section that a field is in; the field itself at the top of a document."""
    return ".".join(field.split(".")[:2])


@pytest.mark.parametrize(("rows", "name"), PLACES, ids=lambda each: each if isinstance(each, str) else "")
def test_a_hint_and_a_conversion_lead_to_the_same_section(rows: Mapping[str, Row], name: str) -> None:
    theirs = Theirs({}, {each: row.default for each, row in rows.items()}, 1, "job")
    outcome: Any = rows[name].convert(rows[name].default, theirs)
    hinted = our_field(name)
    assert hinted is not None
    if outcome is not None and not isinstance(outcome, Unneeded) and outcome.values:
        assert section(hinted) in {section(field) for field in outcome.values}
