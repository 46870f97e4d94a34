"""Asynchronous jobs whose responses go on with newer weights, whole (`async.newWeights: switch`)."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import BatchReference, WeightsReference
from rlhfless_functions.data.rollouts import PreparedSample
from rlhfless_functions.learning.batch import read_batch
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.training.actors import live_actor
from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from rlhfless_operator.training.stages import live_actors
from tests.training.asynchronous.test_loop import check_prompts, entries, replayed
from tests.training.killing import start
from tests.training.switching import POINTS, switch_midway
from tests.training.whole_jobs import MakeJob, folder_of, half_written, records_of, run_job

SWITCHING: dict[str, Any] = {
    "async": {"maxStaleness": 1, "newWeights": "switch"},
    "checkpoints": {"keepRollouts": True, "everySteps": 2},
    # Long enough that some response goes on when its request is cut.
    "sampling": {"maxResponseTokens": 160},
    "generation": {"flush": "1ms"},
    "limits": {"stall": "250s"},
}


HELD_BACK = """
import os, sys, time

def hold():
    if (module := sys.modules.get("rlhfless_functions.generation.live_batch")) is None:
        return
    advance = module.LiveBatch._advance

    def held(batch):
        advance(batch)
        # Of the versions that may come, the one that the step before makes is sure to.
        steps = [step for step, _, _ in batch._tasks]
        if steps and batch._version < min(steps) - 1 and batch._counts.now(batch._run)[0].response > 30:
            while batch._context.stop_reason is None and not len(batch._inbox):
                batch._tell()
                for share in batch._shares.values():
                    share.flush(batch._clock())
                time.sleep(0.05)

    module.LiveBatch._advance = held

os.register_at_fork(after_in_child=hold)
"""


@pytest.fixture
def prefetches(cold_start: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instances decode no further with stale weights once newer ones may come, until they are told of them."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HELD_BACK)
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=":")

    def is_ready(actor: live_actor.LiveActor, new: WeightsReference) -> bool:
        return (actor.prefetched or -1) >= new.version

    # One that looks for nothing yet would be told at once.
    monkeypatch.setattr(live_actor.LiveActor, "is_ready_for", is_ready)


@pytest.fixture
def switches_midway(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(LocalPlatform, "run", LocalPlatform.run)
    monkeypatch.setattr(RolloutsAhead, "__init__", RolloutsAhead.__init__)
    monkeypatch.setattr(live_actors.LiveActors, "room", live_actors.LiveActors.room)
    switch_midway()
    yield


def check_switched(file: Path, steps: int, most: int) -> int:
    """That what is written down of each step is what it learnt from; returns how many responses have several versions.

    No token is missing or there twice: the spans of a prepared sample cover its tokens, each once.
    """
    begun, taken = entries(file, "begun"), entries(file, "taken")
    records = [record for record in records_of(file) if record["step"]]
    assert [entry["step"] for entry in taken] == [entry["step"] for entry in begun] == list(range(1, steps + 1))
    switched = 0
    with_which = {entry["step"]: entry["policy"]["version"] for entry in begun}
    for entry, record in zip(taken, records, strict=True):
        step, metrics = entry["step"], record["metrics"]
        samples = read_batch(BatchReference.model_validate(entry["batch"]))
        assert len(samples) == 16
        rollouts = [group["rollout"] or step for group in entry["groups"] for _ in range(4)]
        for sample, rollout in zip(samples, rollouts, strict=True):
            check_spans(sample)
            assert with_which[rollout] <= sample.versions[0].version
            assert sample.versions[-1].version <= step - 1
        for group in entry["groups"]:
            mine = [min(sampled_by(sample)) for sample in samples if sample.prompt == group["prompt"]]
            assert len(mine) == 4
            assert group["version"] == min(mine), "its oldest token counts"
            assert 0 <= step - 1 - group["version"] <= most
        stale = [step - 1 - group["version"] for group in entry["groups"]]
        assert metrics["generation/staleness"] == pytest.approx(sum(stale) / len(stale))
        by_token = [step - 1 - version for sample in samples for version in sampled_by(sample)]
        assert metrics["generation/token_staleness"] == pytest.approx(sum(by_token) / len(by_token))
        here = sum(len(set(sampled_by(sample))) > 1 for sample in samples)
        assert metrics["generation/switched_responses"] == here / 16
        switched += here
    return switched


def sampled_by(sample: PreparedSample) -> list[int]:
    """The version of each token that was sampled."""
    given = {position for start, end in sample.given for position in range(start, end)}
    return [each.version for each in sample.versions for at in range(each.start, each.end) if at not in given]


def check_spans(sample: PreparedSample) -> None:
    ends = [0, *(span.end for span in sample.versions)]
    assert [span.start for span in sample.versions] == ends[:-1]
    assert ends[-1] == len(sample.response_tokens) == len(sample.log_probs)
    versions = [span.version for span in sample.versions]
    assert versions == sorted(set(versions)), "weights never get older"


@pytest.mark.usefixtures("warm_start", "switches_midway")
def test_responses_go_on_with_newer_weights_and_the_replay_has_the_same_weights(tiny_job: MakeJob) -> None:
    file = tiny_job("switching", **SWITCHING, steps=3)
    assert run_job(file)["phase"] == "Succeeded"
    assert check_switched(file, 3, 1) > 0
    check_prompts(file)
    records = [record for record in records_of(file) if record["step"]]
    assert sum(record["metrics"]["generation/switches"] for record in records) > 0
    assert all(record["metrics"]["generation/lost_instances"] == 0 for record in records)
    assert half_written(folder_of(file)) == []
    assert "3 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("prefetches")
@pytest.mark.parametrize("kv_cache", [pytest.param("recompute", marks=pytest.mark.nightly), "keep"])
def test_instances_have_newer_weights_in_memory_when_they_are_told_of_them(tiny_job: MakeJob, kv_cache: str) -> None:
    kept = {
        "generation": {"flush": "1ms", "keepAlive": "10m"},
        "async": {"maxStaleness": 1, "newWeights": "switch", "kvCache": kv_cache},
    }
    file = tiny_job("prefetched", **{**SWITCHING, **kept}, steps=3)
    assert run_job(file)["phase"] == "Succeeded"
    assert check_switched(file, 3, 1) > 0
    metrics = [record["metrics"] for record in records_of(file) if record["step"]]
    assert sum(step["generation/switches"] for step in metrics) > 0
    assert sum(step.get("weights/prefetched", 0) for step in metrics) > 0
    assert all(step["generation/lost_instances"] == 0 for step in metrics)
    if kv_cache == "keep":
        assert sum(step["generation/kept_responses"] for step in metrics) > 0
        assert sum(step["generation/kept_tokens"] for step in metrics) > 0
    else:
        assert all("generation/kept_responses" not in step for step in metrics)
    assert "3 steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start", "switches_midway")
@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "ppo", "kl": {"coefficient": 0.01}}},
        {"algorithm": {"name": "dapo", "kl": {"coefficient": 0.0}, "dynamicSamplingRounds": 1}},
        pytest.param({"model": {"lora": {"rank": 4}}}, marks=pytest.mark.nightly),
        pytest.param(
            {
                "async": {"maxStaleness": 2, "newWeights": "switch", "kvCache": "keep"},
                "generation": {"flush": "1ms", "drafting": "auto"},
            },
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["ppo", "dapo", "an adapter", "drafts and kept keys"],
)
def test_whatever_a_job_trains_it_learns_from_switched_responses(tiny_job: MakeJob, changes: dict[str, Any]) -> None:
    file = tiny_job("changed", **{**SWITCHING, **changes}, steps=3)
    assert run_job(file)["phase"] == "Succeeded"
    assert check_switched(file, 3, changes.get("async", {}).get("maxStaleness", 1)) > 0
    assert "the same weights bit for bit" in replayed(file)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_as_responses_switch_loses_no_token(tiny_job: MakeJob, tmp_path: Path) -> None:
    file, deaths, log = tiny_job("killed", **SWITCHING, steps=3), tmp_path / "deaths.txt", tmp_path / "log.txt"
    command = [sys.executable, "-m", "tests.training.switching", str(file), str(deaths), *POINTS]
    begun: list[dict[str, Any]] = []
    while (status := start(command, log).wait()) == -signal.SIGKILL:
        assert entries(file, "begun")[: len(begun)] == begun
        begun = entries(file, "begun")
    assert status == 0, log.read_text()
    assert sorted(deaths.read_text().split()) == sorted(POINTS)
    assert check_switched(file, 3, 1) > 0
    check_prompts(file)
    assert half_written(folder_of(file)) == []
    assert "3 steps taken again: the same weights bit for bit" in replayed(file)
