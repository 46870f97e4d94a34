"""The search for the setting in which the published figures come out."""

import pytest

from benchmarks.planning import paper_figures
from benchmarks.planning.paper_figures import Setting, beside, distance, figures, search, table, with_ours
from rlhfless_operator.simulator.scenarios import SCENARIOS
from tests.simulator.small_scenario import SMALL


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCENARIOS, "paper-3b-gsm8k-grpo", SMALL)
    for name, values in (("UTILISATIONS", (0.35,)), ("GPUS", (4,)), ("WAKES", (0.5, 2.0)), ("SPLITS", (1.0, 0.5))):
        monkeypatch.setattr(paper_figures, name, values)


def test_the_nearest_setting_comes_first_and_no_figure_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    known: paper_figures.Known = {}
    rows = search(known, [8], [0])
    assert len(rows) == 4
    away = [distance(row["speed"], row["saving"]) for row in rows]
    assert away == sorted(away)
    # Static actors for each split, the paper's policy for each wake time.
    assert len(known) == 4
    monkeypatch.setattr(paper_figures, "simulate_variants", None)
    assert search(known, [8], [0]) == rows


def test_published_figures_are_at_no_distance() -> None:
    assert distance(1.35, 0.448) == pytest.approx(0)
    row = beside((27.0, 100.0), (20.0, 55.2))
    assert distance(row["speed"], row["saving"]) == pytest.approx(0)


def test_ours_stands_beside_the_paper_at_the_same_setting() -> None:
    known: paper_figures.Known = {}
    row = with_ours(known, search(known, [8], [0])[0], [0])
    setting = Setting(8, row["utilisation"], 4, row["wake_seconds"], row["split"])
    assert row["rlhfless"]["seconds"] == figures(known, "rlhfless", setting, [0])[0]
    assert row["rlhfless"]["static_seconds"] == row["static_seconds"]
    assert table([row]).count("\n") == 2


def test_static_actors_on_a_part_of_the_gpus_leave_the_others_to_learning() -> None:
    """Generation takes longer on half of them, and so does learning, since it has the other half alone."""
    known: paper_figures.Known = {}
    whole, half = (figures(known, "static", Setting(32, 0.05, 4, 2.0, split), [0]) for split in (1.0, 0.5))
    assert half[0] > whole[0]
    assert half[1] == pytest.approx(4 * half[0])
