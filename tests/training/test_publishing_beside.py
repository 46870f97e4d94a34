"""Asynchronous jobs whose learner takes the next step before it has published this one, whole."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import Event, LearnRequest, Learnt, RunRequest, Started
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.training.asynchronous import rollouts_ahead
from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.asynchronous.test_loop import check_journal, check_prompts, replayed
from tests.training.killing import start
from tests.training.publishing_late import LatePublishing, publish_late
from tests.training.whole_jobs import MakeJob, folder_of, half_written, records_of, run_job, status_of

STEPS = 5
BESIDE: dict[str, Any] = {
    "async": {"maxStaleness": 1},
    # A learner that is new after each step publishes before it ends.
    "learning": {"keepAlive": "10m"},
    "checkpoints": {"keepRollouts": True, "everySteps": 4},
    "limits": {"stall": "250s"},
    "steps": STEPS,
}


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LatePublishing:
    (tmp_path / "late").mkdir()
    return publish_late(tmp_path / "late", monkeypatch)


def check_run(file: Path) -> None:
    """That the steps are all there, in order and once, and that a replay has the same weights."""
    check_journal(file, STEPS, 1)
    check_prompts(file)
    assert half_written(folder_of(file)) == []
    assert f"{STEPS} steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, marks=pytest.mark.nightly),
        {"algorithm": {"name": "ppo", "kl": {"coefficient": 0.0}}},
        pytest.param({"model": {"dtype": "bfloat16", "lora": {"rank": 4}}}, marks=pytest.mark.nightly),
    ],
    ids=["grpo", "ppo", "adapter"],
)
def test_the_next_step_is_learnt_while_this_one_is_published(
    tiny_job: MakeJob, late: LatePublishing, spec: dict[str, Any]
) -> None:
    file = tiny_job("beside", **BESIDE, **spec)
    run_job(file)
    course = late.course
    records = [record["metrics"] for record in records_of(file) if record["step"]]
    # The fourth step writes a checkpoint, and the fifth is the last.
    assert [line for line in course if line.startswith("published")] == [f"published {step}" for step in (1, 2, 3)]
    for step in (1, 2, 3):
        assert course.index(f"published {step}") > course.index(f"learnt {step + 1}")
    for step, metrics in enumerate(records, start=1):
        assert ("seconds/publish_wait" in metrics) == (step < 5)
        assert metrics["weights/bytes"] > 0
        assert metrics["seconds/publish"] > 0
    kept = json.loads((folder_of(file) / "progress" / "step-000005.json").read_text())
    # What plans expect of a publication: of those that held up no learner.
    seconds = [metrics["seconds/publish"] for metrics in records[:3]]
    assert kept["history"]["publishing"] == pytest.approx(seconds)
    check_run(file)


@pytest.mark.nightly
def test_responses_go_on_with_weights_that_were_published_beside_a_step(
    tiny_job: MakeJob, late: LatePublishing
) -> None:
    file = tiny_job("beside", **{**BESIDE, "async": {"maxStaleness": 2, "newWeights": "switch"}})
    run_job(file)
    assert [line for line in late.course if line.startswith("published")] == [f"published {step}" for step in (1, 2, 3)]
    assert f"{STEPS} steps taken again: the same weights bit for bit" in replayed(file)


@pytest.mark.slow
def test_where_the_next_step_s_groups_are_not_there_the_step_is_written_down_once_it_is_published(
    tiny_job: MakeJob, late: LatePublishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner is done with the first step when no group of the second one is generated."""
    (late.folder / "soon").touch()
    roll_out = rollouts_ahead.roll_out

    async def waits(run: Any, task: Any, on_planned: Any) -> Any:
        while task.step == 2 and not (folder_of(file) / "progress" / "step-000001.json").exists():
            await asyncio.sleep(0.01)
        return await roll_out(run, task, on_planned)

    monkeypatch.setattr(rollouts_ahead, "roll_out", waits)
    file = tiny_job("beside", **BESIDE)
    run_job(file)
    course = late.course
    assert course.index("published 1") < course.index("learnt 2")
    check_journal(file, STEPS, 1)


@pytest.mark.nightly
def test_a_learner_that_is_lost_before_it_has_published_is_made_up_for(
    tiny_job: MakeJob, late: LatePublishing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once as soon as it has learnt a step, and once when it has begun the next one."""
    run, lost = LocalPlatform.run, list[str]()

    async def losing(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        pid = None

        def lose(what: str) -> None:
            if pid is not None and what not in lost:
                lost.append(what)
                os.kill(pid, signal.SIGKILL)

        async with aclosing(run(platform, request)) as events:
            async for event in events:
                if isinstance(request, LearnRequest) and isinstance(event, Started):
                    pid = platform._processes[event.instance].pid
                    if request.unpublished is not None and request.batch.step == 3:
                        lose("begun 3")
                if isinstance(event, Learnt) and request.key.step == 1:
                    lose("learnt 1")
                yield event

    monkeypatch.setattr(LocalPlatform, "run", losing)
    file = tiny_job("beside", **BESIDE)
    run_job(file)
    assert lost == ["learnt 1", "begun 3"]
    check_run(file)


@pytest.mark.nightly
def test_a_driver_that_dies_before_a_step_is_published_loses_nothing(
    tiny_job: MakeJob, late: LatePublishing, tmp_path: Path
) -> None:
    file, deaths, log = tiny_job("beside", **BESIDE), tmp_path / "deaths.txt", tmp_path / "log.txt"
    points = ("left-1", "left-2")
    command = [sys.executable, "-m", "tests.training.dying_ahead", str(file), str(deaths), *points]
    done = []
    while (status := start(command, log).wait()) == -signal.SIGKILL:
        done.append(status_of(file)["step"])
    assert status == 0, log.read_text()
    assert done == [0, 1], "a step that may not be published is not written down"
    check_run(file)


@pytest.mark.slow
def test_a_version_that_the_store_does_not_take_is_the_job_s_error_and_is_published_later(
    tiny_job: MakeJob, late: LatePublishing
) -> None:
    late.fail(True)
    file = tiny_job("beside", **BESIDE)
    with pytest.raises(StageFailedError, match=r"weights/step-000001: the disk is full"):
        run_job(file)
    assert (status_of(file)["phase"], status_of(file)["step"]) == ("Failed", 0)
    assert not (folder_of(file) / "weights" / "step-000001").exists()
    late.fail(False)
    run_job(file)
    check_journal(file, STEPS, 1)
    assert half_written(folder_of(file)) == []
