"""The comparison of whole jobs: what it makes of their steps."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.asynchronous.against_synchronous import summarize


def step(**metrics: float) -> Any:
    ledger = {"generation": SimpleNamespace(seconds=4.0, busy=2.0), "learning": SimpleNamespace(seconds=2.0, busy=1.0)}
    return SimpleNamespace(seconds=2.0, ledger=ledger, metrics={"generation/staleness": 1.0, **metrics})


def test_a_step_in_which_no_rollout_became_complete_counts_for_everything_else() -> None:
    made = {"generation/seconds": 3.0, "planning/expected_seconds": 2.0, "generation/moved_samples": 4.0}
    found = summarize([step(**made), step()], scale=1.0, split=(2, 1), gpus=3)
    assert (found["steps"], found["step_seconds"], found["actors_idle"]) == (2, 2.0, 0.5)
    assert (found["generation_seconds"], found["expected_generation_seconds"]) == (3.0, 2.0)
    assert found["moved_samples"] == pytest.approx(2.0)
