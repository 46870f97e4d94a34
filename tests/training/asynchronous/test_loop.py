"""Asynchronous jobs, whole: what they generate ahead, what they write down of it, and what a replay makes of that."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlhfless_functions import artifacts
from rlhfless_functions.data.rollouts import read_prepared
from rlhfless_operator.cli import app
from rlhfless_operator.job.reading.validation import InvalidJobError, load_job
from rlhfless_operator.local import replay as replay_command
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.training.asynchronous import rollouts_ahead
from tests.training.dying_ahead import OVERTAKEN, POINTS
from tests.training.holding_back import hold_back
from tests.training.killing import start
from tests.training.whole_jobs import (
    MakeJob,
    assume_measured,
    folder_of,
    half_written,
    records_of,
    run_job,
    run_until_a_step_cannot_be_written,
)

AHEAD: dict[str, Any] = {"async": {"maxStaleness": 1}, "checkpoints": {"keepRollouts": True, "everySteps": 2}}


def entries(file: Path, kind: str) -> list[dict[str, Any]]:
    """What is written of each step: `begun` of its rollout, or `taken` by the learner."""
    return [json.loads(path.read_text()) for path in sorted((folder_of(file) / "journal").glob(f"*-{kind}.json"))]


def check_journal(file: Path, steps: int, most: int) -> list[int]:
    """That each step learnt once, from whole groups, of weights that were not too old; returns the versions that began
    the rollouts."""
    begun, taken = entries(file, "begun"), entries(file, "taken")
    assert [entry["step"] for entry in taken] == [entry["step"] for entry in begun] == list(range(1, steps + 1))
    drawn = [(entry["step"], prompt) for entry in begun for prompt in entry["prompts"] or []]
    groups = [(group["rollout"], group["prompt"]) for entry in taken for group in entry["groups"]]
    assert not drawn or sorted(groups) == sorted(drawn), "none is lost, and none is there twice"
    records = [record for record in records_of(file) if record["step"]]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    with_which = {entry["step"]: entry["policy"]["version"] for entry in begun}
    for entry, record in zip(taken, records, strict=True):
        versions = [group["version"] for group in entry["groups"]]
        assert versions == [with_which[group["rollout"] or entry["step"]] for group in entry["groups"]]
        assert entry["base"] == entry["step"] - 1
        stale = [entry["base"] - version for version in versions]
        assert 0 <= min(stale) <= max(stale) <= most
        assert record["metrics"]["generation/staleness"] == sum(stale) / len(stale)
        assert "planning/lower_bound_share" not in record["metrics"], "its generation is not in its account"
        samples = [(sample["prompt"], sample["index"]) for sample in entry["batch"]["samples"]]
        assert samples == [(group["prompt"], index) for group in entry["groups"] for index in range(4)]
    return [entry["policy"]["version"] for entry in begun]


def check_prompts(file: Path, per_epoch: int = 12) -> None:
    """That no prompt was left out or learnt from twice in an epoch."""
    prompts = [prompt for entry in entries(file, "begun") for prompt in entry["prompts"] or []]
    for first in range(0, len(prompts) - per_epoch + 1, per_epoch):
        assert sorted(prompts[first : first + per_epoch]) == list(range(per_epoch))


def replayed(file: Path) -> str:
    """What `rlhfless replay` says of a run, of which it leaves nothing behind."""
    result = CliRunner().invoke(app, ["replay", str(folder_of(file))])
    assert result.exit_code == 0, result.output + str(result.exception)
    assert not (folder_of(file) / "replay").exists()
    return result.output


@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("most", [1, 2])
def test_steps_are_generated_ahead_and_the_replay_has_the_same_weights(
    tiny_job: MakeJob, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[tuple[int, int]] = []
    roll_out = rollouts_ahead.roll_out

    async def noted(run: Any, task: Any, on_planned: Any) -> Any:
        under_way.append((task.step, task.policy.begun.version))
        return await roll_out(run, task, on_planned)

    monkeypatch.setattr(rollouts_ahead, "roll_out", noted)
    file = tiny_job("ahead", **{**AHEAD, "async": {"maxStaleness": most}}, steps=6)
    summary = run_job(file)
    assert summary["phase"] == "Succeeded"
    versions = check_journal(file, 6, most)
    assert under_way == list(enumerate(versions, start=1))
    assert versions[:2] == [0, 0], "the second step's groups are sampled before the first step is learnt"
    check_prompts(file)
    assert {record["plan"]["prefixes"] for record in records_of(file)} == {
        "no: rollouts of an asynchronous job overlap"
    }
    assert half_written(folder_of(file)) == []
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_the_next_step_is_generated_while_the_longest_response_of_this_one_goes_on(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process of the first step stands still until the whole second step is written down."""
    file = tiny_job("long", **AHEAD, limits={"stall": "250s"}, steps=4)
    second = folder_of(file) / "results" / "step-000002" / "batch.json"
    monkeypatch.setattr(LocalPlatform, "run", LocalPlatform.run)
    finished = hold_back(1, until=second.exists, then=lambda pid: os.kill(pid, signal.SIGCONT))
    assert run_job(file)["phase"] == "Succeeded"
    last = max(at for at, step in enumerate(finished) if step == 1)
    assert finished[: last + 1].count(2) == 16, "the second step's samples were finished before the first step's last"
    assert check_journal(file, 4, 1)[:2] == [0, 0]
    check_prompts(file)
    assert records_of(file)[0]["metrics"]["generation/lost_instances"] == 0
    assert "4 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_the_last_samples_are_gathered_and_are_what_they_would_have_been(tiny_job: MakeJob) -> None:
    """Of a version, so that another actor takes newer weights, or of the job."""
    sampling = {"maxPromptTokens": 16, "maxResponseTokens": 400}
    settings = {"sampling": sampling, "generation": {"flush": "1ms"}, "limits": {"stall": "250s"}}
    file = tiny_job("gathered", **AHEAD, **settings, planning={"policy": "even"}, steps=3)
    assert run_job(file)["phase"] == "Succeeded"
    check_journal(file, 3, 1)
    check_prompts(file)
    metrics = [record["metrics"] for record in records_of(file) if record["step"]]
    assert sum(each["generation/moved_samples"] for each in metrics) > 0
    assert sum(each["generation/lost_instances"] for each in metrics) == 0
    assert "3 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize(
    "algorithm",
    [
        {
            "name": "ppo",
            "kl": {"coefficient": 0.01, "placement": "reward", "estimator": "k1"},
            "critic": {"warmupSteps": 1},
            "epochs": 2,
        },
        {"name": "dapo", "kl": {"coefficient": 0.0}, "dynamicSamplingRounds": 1},
    ],
    ids=["ppo", "dapo"],
)
def test_algorithms_that_ask_for_whole_steps_have_them(tiny_job: MakeJob, algorithm: dict[str, Any]) -> None:
    file = tiny_job("whole", **AHEAD, algorithm=algorithm, batch={"minibatchSamples": 8}, steps=3)
    assert run_job(file)["phase"] == "Succeeded"
    check_journal(file, 3, 1)
    assert "the same weights bit for bit" in replayed(file)
    parts = [str(path) for path in (folder_of(file) / "batches").rglob("*.parquet")]
    samples = [sample for part in parts for sample in read_prepared([part]).values()]
    metrics = [record["metrics"] for record in records_of(file) if record["step"]]
    assert len(samples) >= 3 * 16
    if algorithm["name"] == "ppo":
        assert {(sample.values, sample.advantages, sample.returns) for sample in samples} == {(None, None, None)}
        assert all("value/error" in each and "values" not in each for each in metrics)
        assert metrics[0]["value/mean"] != 0, "after the first update"
    else:
        assert all(sample.advantages is not None for sample in samples)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_evaluations_are_of_the_step_that_they_follow(tiny_job: MakeJob) -> None:
    evaluation = {"data": {"source": "train.jsonl"}, "everySteps": 2}
    file = tiny_job("evaluated", **AHEAD, evaluation=evaluation, steps=4)
    run_job(file)
    assert [record["step"] for record in records_of(file) if record["evaluation"]] == [0, 2, 4]
    check_journal(file, 4, 1)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_where_learning_takes_longest_weights_are_no_older_than_they_must_be(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    assume_measured(monkeypatch, {"learning": 100.0, "rollout": 10.0})
    file = tiny_job("steady", **{**AHEAD, "async": {"maxStaleness": 3}}, steps=5)
    run_job(file)
    began = check_journal(file, 5, 3)
    # A group that comes late may be learnt from a step later, when it is a version older.
    assert all(rollout - 1 - version <= 1 for rollout, version in enumerate(began, start=1))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_driver_that_comes_later_goes_on_with_the_weights_that_began(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies when step 2 is to be written down, with step 3 generated by the version of step 1 or 2."""
    file = tiny_job("late", **AHEAD, steps=5)
    journal = folder_of(file) / "journal"
    run_until_a_step_cannot_be_written(file, monkeypatch, 2, lambda: (journal / "step-000003-begun.json").exists())
    before = entries(file, "begun")
    assert [entry["step"] for entry in before] == [1, 2, 3]
    run_job(file)
    assert entries(file, "begun")[:3] == before
    check_journal(file, 5, 1)
    check_prompts(file)
    assert "the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("algorithm", "points"),
    [
        pytest.param("ppo", ("taken-2",), marks=pytest.mark.nightly),
        pytest.param("grpo", (OVERTAKEN,), marks=pytest.mark.nightly),
        pytest.param("grpo", POINTS, marks=pytest.mark.nightly),
    ],
    ids=["one death", "overtaken", "eight deaths"],
)
def test_wherever_a_driver_is_killed_no_group_is_lost_or_learnt_from_twice(
    tiny_job: MakeJob, tmp_path: Path, algorithm: str, points: tuple[str, ...]
) -> None:
    file = tiny_job("killed", **AHEAD, algorithm={"name": algorithm}, steps=4)
    deaths, log = tmp_path / "deaths.txt", tmp_path / "log.txt"
    command = [sys.executable, "-m", "tests.training.dying_ahead", str(file), str(deaths), *points]
    begun: list[dict[str, Any]] = []
    taken: list[dict[str, Any]] = []
    while (status := start(command, log).wait()) == -signal.SIGKILL:
        assert entries(file, "begun")[: len(begun)] == begun, "staleness is what it was"
        assert entries(file, "taken")[: len(taken)] == taken
        begun, taken = entries(file, "begun"), entries(file, "taken")
    assert status == 0, log.read_text()
    assert entries(file, "begun")[: len(begun)] == begun
    assert entries(file, "taken")[: len(taken)] == taken
    assert sorted(deaths.read_text().split()) == sorted(points)
    check_journal(file, 4, 1)
    check_prompts(file)
    assert half_written(folder_of(file)) == []
    assert "4 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_synchronous_run_is_replayed_too_and_a_changed_weight_is_found(tiny_job: MakeJob) -> None:
    file = tiny_job("sync", checkpoints={"keepRollouts": True}, steps=2)
    run_job(file)
    assert not (folder_of(file) / "journal").exists()
    assert "2 steps taken again: the same weights bit for bit" in replayed(file)
    manifest = folder_of(file) / "weights" / "step-000002" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["files"]["model.safetensors"]["checksum"] = "xxh3-128:00"
    manifest.write_bytes(artifacts.sealed_json(content))
    result = CliRunner().invoke(app, ["replay", str(folder_of(file)), "--keep"])
    assert result.exit_code == 1
    assert "files differ (model.safetensors)" in result.output
    assert list((folder_of(file) / "replay").rglob("model.safetensors")), "it was asked to keep them"


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_replay_takes_the_threads_of_the_run_and_asks_where_they_changed(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny_job("threads", checkpoints={"keepRollouts": True}, steps=2)
    run_job(file, threads=2)
    assert [record["metrics"]["learning/threads"] for record in records_of(file)] == [2, 2]
    given: list[int] = []
    lone_learner = replay_command.lone_learner

    def noted(job: Any, folder: Any, threads: int, command: str) -> Any:
        given.append(threads)
        return lone_learner(job, folder, threads, command)

    monkeypatch.setattr(replay_command, "lone_learner", noted)
    assert "the same weights bit for bit" in replayed(file)
    assert given == [2]
    metrics = folder_of(file) / "metrics.jsonl"
    edited = re.sub(r'("learning/threads": ?)2', r"\g<1>1", metrics.read_text(), count=1)
    metrics.write_text(re.sub(r', "checksum": "[^"]*"', "", edited))
    assert [record["metrics"]["learning/threads"] for record in records_of(file)] == [1, 2]
    result = CliRunner().invoke(app, ["replay", str(folder_of(file))])
    assert result.exit_code == 1
    assert "were learnt with 1 and 2 threads" in str(result.exception)
    assert "--threads" in str(result.exception)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_run_that_has_not_kept_its_batches_is_not_replayed(tiny_job: MakeJob) -> None:
    file = tiny_job("forgetful", checkpoints={"everySteps": 1}, steps=3)
    run_job(file)
    result = CliRunner().invoke(app, ["replay", str(folder_of(file))])
    assert result.exit_code == 1
    assert "has not kept what step 1 learnt from" in str(result.exception)
    assert "checkpoints.keepRollouts" in str(result.exception)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"async": {"maxStaleness": 0}}, r"spec\.async\.maxStaleness: 0 is out of bounds; write at least 1"),
        ({"async": {"maxStaleness": 9}}, r"spec\.async\.maxStaleness: 9 is out of bounds; write at most 8"),
        ({"async": {"newWeights": "keep"}}, r'spec\.async\.newWeights: "keep" is not a choice; write .*finish.*switch'),
        (
            {
                "async": {"newWeights": "switch"},
                "algorithm": {"name": "rloo", "kl": {"coefficient": 0.1, "placement": "reward"}},
            },
            r"spec\.async\.newWeights: with switch .*; write finish, or algorithm\.kl\.placement: loss",
        ),
        (
            {"async": {}, "algorithm": {"name": "grpo", "importanceSampling": {"mode": "none"}}},
            r"spec\.algorithm\.importanceSampling\.mode: without a correction, async .*; write truncate or mask, or",
        ),
        (
            {"async": {}, "generation": {"sharePrefixes": "always"}},
            r"spec\.generation\.sharePrefixes: with async .*; write auto or never, or remove async",
        ),
    ],
)
def test_what_async_does_not_go_with_is_refused(tiny_job: MakeJob, spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidJobError, match=message):
        load_job(tiny_job("refused", **spec))


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "grpo", "proximalPolicy": "sampler", "importanceSampling": {"mode": "none"}},
        {"name": "grpo", "importanceSampling": {"mode": "none", "rejection": {"level": "token", "high": 5.0}}},
    ],
)
def test_stale_samples_are_corrected_in_other_ways(tiny_job: MakeJob, algorithm: dict[str, Any]) -> None:
    assert load_job(tiny_job("corrected", **{"async": {}}, algorithm=algorithm)).spec.asynchronous is not None
