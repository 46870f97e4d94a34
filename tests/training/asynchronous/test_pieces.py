"""Asynchronous jobs whose learner begins with the groups that are there, whole."""

import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import Event, RunRequest, Started, Waiting
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.requests.builder import RequestBuilder
from tests.training.asynchronous.test_loop import AHEAD, check_journal, check_prompts, entries, replayed
from tests.training.holding_back import hold_back
from tests.training.killing import start
from tests.training.whole_jobs import MakeJob, folder_of, half_written, records_of, run_job

IN_PIECES: dict[str, Any] = {
    **AHEAD,
    "batch": {"minibatchSamples": None},
    "limits": {"stall": "250s"},
}


def check_pieces(file: Path) -> list[int]:
    """That each step learnt from its pieces in their order; returns how many each had."""
    counts = []
    for entry in entries(file, "taken"):
        folder = folder_of(file) / "batches" / f"step-{entry['step']:06d}" / "pieces"
        pieces = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
        assert [group for piece in pieces for group in piece["groups"]] == entry["groups"]
        assert [len(piece["samples"]) for piece in pieces] == [each["samples"] for each in entry["batch"]["pieces"]]
        counts.append(len(pieces))
    return counts


def on_waiting(monkeypatch: pytest.MonkeyPatch, then: Callable[[int], None] = lambda pid: None) -> list[int]:
    """How many pieces learners have finished each time that one begins to wait for another; `then` is told the first
    learner's process."""
    run, waited = LocalPlatform.run, list[int]()

    async def noted(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        pid = None
        async with aclosing(run(platform, request)) as events:
            async for event in events:
                if request.key.stage == "learning":
                    pid = platform._processes[event.instance].pid if isinstance(event, Started) else pid
                    if isinstance(event, Waiting) and event.waiting:
                        waited.append(event.pieces)
                        if len(waited) == 1 and pid is not None:
                            then(pid)
                yield event

    monkeypatch.setattr(LocalPlatform, "run", noted)
    return waited


@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize(
    "dies",
    ["nobody", pytest.param("learner", marks=pytest.mark.slow), pytest.param("actor", marks=pytest.mark.slow)],
)
def test_the_learner_begins_before_the_step_has_all_of_its_groups(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    """An actor of the first rollout stands still until the learner waits for another piece. It or the learner is killed
    then."""
    waited = on_waiting(monkeypatch, lambda pid: os.kill(pid, signal.SIGKILL) if dies == "learner" else None)
    then = signal.SIGKILL if dies == "actor" else signal.SIGCONT
    hold_back(1, until=lambda: bool(waited), then=lambda pid: os.kill(pid, then))
    file = tiny_job("pieces", **IN_PIECES, steps=4)
    assert run_job(file)["phase"] == "Succeeded"
    assert waited[0] > 0, "it had learnt from a piece"
    check_journal(file, 4, 1)
    check_prompts(file)
    assert max(check_pieces(file)) > 1
    waits = [record for record in records_of(file) if record["metrics"].get("seconds/wait")]
    assert waits or dies == "learner"
    assert all(each["stages"]["generation"] >= each["metrics"]["seconds/wait"] for each in waits)
    assert half_written(folder_of(file)) == []
    assert "4 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_group_that_comes_too_late_counts_for_less_in_its_piece(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"async": {"maxStaleness": 2, "tooStale": "downweight", "newWeights": "switch"}}
    file = tiny_job("late", **{**IN_PIECES, **settings}, steps=6)
    fourth = folder_of(file) / "journal" / "step-000004-taken.json"
    monkeypatch.setattr(LocalPlatform, "run", LocalPlatform.run)
    hold_back(1, until=fourth.exists, then=lambda pid: os.kill(pid, signal.SIGCONT))
    assert run_job(file)["phase"] == "Succeeded"
    groups = [
        (entry["base"] - group["version"], group) for entry in entries(file, "taken") for group in entry["groups"]
    ]
    assert all(group["factor"] == (1.0 if stale <= 2 else 3 / (1 + stale)) for stale, group in groups)
    assert max(stale for stale, _ in groups) > 2
    check_pieces(file)
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "points",
    [
        ("piece0-1", "piece1-2"),
        pytest.param(("piece0-1", "piece1-2", "taken-2", "left-2", "piece0-3", "learnt-3"), marks=pytest.mark.nightly),
    ],
    ids=["two deaths", "six deaths"],
)
def test_wherever_a_driver_is_killed_no_group_is_lost_or_learnt_from_twice(
    tiny_job: MakeJob, tmp_path: Path, points: tuple[str, ...]
) -> None:
    file, deaths, log = tiny_job("killed", **IN_PIECES, steps=4), tmp_path / "deaths", tmp_path / "log"
    command = [sys.executable, "-m", "tests.training.dying_ahead", str(file), str(deaths), *points]
    folder = folder_of(file) / "batches"
    before: dict[str, str] = {}
    while (status := start(command, log).wait()) == -signal.SIGKILL:
        now = {str(path): path.read_text() for path in folder.glob("step-*/pieces/*.json")}
        assert before.items() <= now.items(), "what a learner may have learnt from stays"
        before = now
    assert status == 0, log.read_text()
    # A second piece, and a step that is left unpublished, come only where groups do not come together.
    assert {"piece0-1", *points} - {"piece1-2", "left-2"} <= set(deaths.read_text().split())
    check_journal(file, 4, 1)
    check_prompts(file)
    check_pieces(file)
    assert half_written(folder_of(file)) == []
    assert "4 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.parametrize(
    ("spec", "in_pieces"),
    [
        ({}, True),
        ({"learning": {"overlap": "never"}}, False),
        ({"batch": {"minibatchSamples": 8}}, False),
        ({"algorithm": {"name": "ppo", "advantageNormalization": "none"}}, False),
        ({"algorithm": {"name": "grpo", "advantageNormalization": "batch"}}, False),
    ],
    ids=["by groups", "never", "several updates", "values of the learner's critic", "whitened over the batch"],
)
def test_steps_that_need_their_whole_batch_wait_for_it(
    tiny_job: MakeJob, spec: dict[str, Any], in_pieces: bool
) -> None:
    job = load_job(tiny_job("some", **{**IN_PIECES, **spec}))
    assert RequestBuilder(job, JobFolder("folder"), "uid").learns_in_pieces == in_pieces
    assert not RequestBuilder(job, JobFolder("folder"), "uid", overlaps=False).learns_in_pieces
