"""What a job says of its datasets."""

from typing import Any

import pytest

from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.training.stages.datasets import epochs_note
from tests.jobs import document


def spec(algorithm: dict[str, Any], **length: int) -> RLHFJobSpec:
    given = {name: value for name, value in document()["spec"].items() if name not in ("steps", "epochs")}
    return RLHFJobSpec.model_validate({**given, "algorithm": algorithm, **length})


def test_epochs_with_dynamic_sampling_are_said_to_draw_prompts_more_often() -> None:
    note = epochs_note(spec({"name": "dapo"}, epochs=2), 30)
    assert note is not None
    assert note.startswith("epochs: 2 is 30 steps")


@pytest.mark.parametrize(
    ("algorithm", "length"),
    [
        ({"name": "dapo"}, {"steps": 3}),
        ({"name": "grpo"}, {"epochs": 2}),
        ({"name": "dapo", "dynamicSamplingRounds": 0}, {"epochs": 2}),
    ],
)
def test_other_lengths_are_what_they_say(algorithm: dict[str, Any], length: dict[str, int]) -> None:
    assert epochs_note(spec(algorithm, **length), 30) is None
