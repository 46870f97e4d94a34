"""The warning of instances that idled for too long."""

from types import SimpleNamespace

import pytest

from rlhfless_operator.training.stages.idling import note_idling

SWITCH = 3.0


def notes_of(idle: dict[str, float], *, step: int = 2, keeps: bool = False) -> list[str]:
    notes: list[str] = []
    capacity = SimpleNamespace(switch_seconds=lambda stage: SWITCH, keeps=lambda stage: keeps)
    run = SimpleNamespace(capacity=capacity, progress=SimpleNamespace(note=notes.append))
    journal = SimpleNamespace(ledger=SimpleNamespace(take_longest_idle=lambda: idle))
    note_idling(run, journal, step)  # type: ignore[arg-type]
    return notes


def test_an_instance_that_idled_for_longer_than_a_switch_is_told_of() -> None:
    assert notes_of({"learning": 51.0, "generation": SWITCH + 5}) == [
        "step 2: a learning instance idled for 51.0 s, and to let it go and start another would have taken 3.0 s;"
        " the step was not as forecast"
    ]


@pytest.mark.parametrize("meant", [{"step": 1}, {"keeps": True}], ids=["the first step", "kept by wish"])
def test_idling_that_is_meant_is_not(meant: dict[str, int]) -> None:
    assert notes_of({"learning": 51.0}, **meant) == []  # type: ignore[arg-type]
