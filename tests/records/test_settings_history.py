"""Which settings each step was learnt with, as a job's folder tells it."""

from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import StepSettings
from rlhfless_functions.settings import OptimizerSettings
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.settings_history import (
    SettingsHistory,
    read_settings_history,
    write_settings_history,
)


def settings(rate: float, steps: int = 10, schedule: str = "constant") -> StepSettings:
    optimizer = OptimizerSettings.model_validate({"learning_rate": rate, "schedule": schedule})
    return StepSettings(optimizer=optimizer, total_steps=steps)


def test_each_step_has_the_settings_of_the_last_change_before_it() -> None:
    history = SettingsHistory().with_change(1, settings(1e-3)).with_change(4, settings(1e-4))
    assert [history.of(step) for step in (1, 3, 4, 9)] == [settings(1e-3)] * 2 + [settings(1e-4)] * 2
    assert history.other_than(settings(1e-4), range(2, 6)) == {2: settings(1e-3), 3: settings(1e-3)}
    assert list(history.changes()) == [(4, ["spec.optimizer.learningRate 0.001 → 0.0001"])]


def test_of_a_step_that_nothing_is_known_of_nothing_is_said() -> None:
    history = SettingsHistory().with_change(3, settings(1e-3))
    assert history.of(2) is None
    assert history.other_than(settings(1e-4), [1, 2]) == {}


def test_a_change_that_no_step_was_taken_with_is_forgotten() -> None:
    begun = SettingsHistory().with_change(1, settings(1e-3))
    assert begun.with_change(4, settings(1e-4)).with_change(4, settings(1e-3)).spans == begun.spans


@pytest.mark.parametrize(("schedule", "said"), [("constant", []), ("linear", ["the job's steps 10 → 20"])])
def test_more_steps_are_a_change_to_a_person_only_where_the_rate_depends_on_them(
    schedule: str, said: list[str]
) -> None:
    history = SettingsHistory().with_change(1, settings(1e-3, 10, schedule))
    assert list(history.with_change(5, settings(1e-3, 20, schedule)).changes()) == [(5, said)]


def test_what_is_written_is_read_again_and_damage_is_named(tmp_path: Path) -> None:
    folder = JobFolder(str(tmp_path))
    assert read_settings_history(folder).spans == ()
    history = SettingsHistory().with_change(1, settings(1e-3)).with_change(2, settings(1e-4, 20, "cosine"))
    write_settings_history(folder, history)
    assert read_settings_history(folder).spans == history.spans
    lines = (tmp_path / "settings.jsonl").read_text().splitlines()
    for kept in (lines[:1], lines[1:]):
        (tmp_path / "settings.jsonl").write_text("\n".join(kept))
        with pytest.raises(artifacts.ArtifactCorruptError, match=r"settings\.jsonl is damaged \(it has 1 of 2 lines"):
            read_settings_history(folder)
    (tmp_path / "settings.jsonl").write_text("nonsense")
    with pytest.raises(artifacts.ArtifactCorruptError, match=r"settings\.jsonl is damaged"):
        read_settings_history(folder)
