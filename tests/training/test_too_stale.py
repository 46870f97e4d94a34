"""Groups that take longer than others, in whole asynchronous jobs: for each `async.tooStale`, one process held back."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.platforms.local.platform import LocalPlatform
from tests.training.asynchronous.test_loop import AHEAD, check_journal, check_prompts, entries, replayed
from tests.training.holding_back import hold_back
from tests.training.killing import start
from tests.training.whole_jobs import MakeJob, folder_of, half_written, records_of, run_job


def held_back_job(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, rule: str, until_step: int) -> Path:
    """A job of six steps; a process of the first rollout stands still until a step has taken its groups."""
    settings = {"async": {"maxStaleness": 2, "tooStale": rule}, "limits": {"stall": "250s"}}
    file = tiny_job(rule, **{**AHEAD, **settings}, steps=6)
    taken = folder_of(file) / "journal" / f"step-{until_step:06d}-taken.json"
    monkeypatch.setattr(LocalPlatform, "run", LocalPlatform.run)
    hold_back(1, until=taken.exists, then=lambda pid: os.kill(pid, signal.SIGCONT))
    assert run_job(file)["phase"] == "Succeeded"
    assert half_written(folder_of(file)) == []
    return file


def taken_groups(file: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(entry["step"], group) for entry in entries(file, "taken") for group in entry["groups"]]


def metric(file: Path, name: str) -> list[float]:
    return [record["metrics"][name] for record in records_of(file) if record["step"]]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_the_learner_goes_on_without_a_group_until_it_would_become_too_stale(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = held_back_job(tiny_job, monkeypatch, "wait", until_step=2)
    check_journal(file, 6, 2)
    check_prompts(file)
    of_first = {step for step, group in taken_groups(file) if group["rollout"] == 1}
    assert max(of_first) == 3, "that is the last step that may learn from version 0"
    assert sum(metric(file, "generation/dropped_groups")) == sum(metric(file, "generation/downweighted_groups")) == 0
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_group_that_comes_too_late_is_dropped_and_its_prompt_generated_anew(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = held_back_job(tiny_job, monkeypatch, "drop", until_step=4)
    begun, groups = entries(file, "begun"), taken_groups(file)
    names = [(group["rollout"], group["prompt"]) for _, group in groups]
    assert len(set(names)) == len(names) == 24
    assert all(0 <= step - 1 - group["version"] <= 2 for step, group in groups)
    drawn = Counter((entry["step"], prompt) for entry in begun for prompt in entry["prompts"])
    again = [(name["rollout"], name["prompt"]) for entry in begun for name in entry["again"]]
    assert again, "the held groups were dropped"
    assert len(again) == sum(metric(file, "generation/dropped_groups"))
    assert set(drawn) == {*names, *again}, "each group is learnt from or generated anew"
    assert not set(names) & set(again)
    fresh = [p for e in begun for p in e["prompts"][len(e["again"]) :]]
    assert sorted(fresh) == sorted([*range(12)] * 2), "two epochs, and no prompt is lost"
    assert sorted(prompt for _, prompt in names) == sorted(fresh)
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.usefixtures("warm_start")
def test_a_group_that_comes_too_late_counts_for_less(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    file = held_back_job(tiny_job, monkeypatch, "downweight", until_step=4)
    check_prompts(file)
    late = 0
    for step, group in taken_groups(file):
        stale = step - 1 - group["version"]
        assert group["factor"] == (1.0 if stale <= 2 else 3 / (1 + stale))
        late += stale > 2
    assert late == sum(metric(file, "generation/downweighted_groups")) > 0
    names = Counter((group["rollout"], group["prompt"]) for _, group in taken_groups(file))
    drawn = Counter((entry["step"], prompt) for entry in entries(file, "begun") for prompt in entry["prompts"])
    assert names == drawn
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("rule", "points"),
    [
        ("drop", ("begun-4", "taken-4")),
        ("wait", ("prepared-2", "taken-3")),
        ("downweight", ("taken-2", "learnt-4")),
    ],
)
def test_wherever_a_driver_is_killed_no_group_is_lost_or_learnt_from_twice(
    tiny_job: MakeJob, tmp_path: Path, rule: str, points: tuple[str, ...]
) -> None:
    settings = {"async": {"maxStaleness": 2, "tooStale": rule}}
    file, deaths, log = tiny_job("killed", **{**AHEAD, **settings}, steps=5), tmp_path / "deaths", tmp_path / "log"
    command = [sys.executable, "-m", "tests.training.dying_ahead", str(file), str(deaths), *points]
    before: list[dict[str, Any]] = []
    while (status := start(command, log).wait()) == -signal.SIGKILL:
        now = [*entries(file, "begun"), *entries(file, "taken")]
        assert all(entry in now for entry in before), "what is written down stays"
        before = now
    assert status == 0, log.read_text()
    assert sorted(deaths.read_text().split()) == sorted(points)
    groups = taken_groups(file)
    names = [(group["rollout"], group["prompt"]) for _, group in groups]
    again = [(name["rollout"], name["prompt"]) for entry in entries(file, "begun") for name in entry["again"]]
    assert len(set(names)) == len(names) == 20
    drawn = {(entry["step"], prompt) for entry in entries(file, "begun") for prompt in entry["prompts"]}
    assert drawn == {*names, *again}
    assert sum(metric(file, "generation/dropped_groups")) == len(again)
    assert "5 steps taken again: the same weights bit for bit" in replayed(file)
