"""The benchmark of jobs that take turns: what its timeline says, and a small run of it."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
from benchmarks.slot_timeline import Timeline
from benchmarks.slots import Setting, run_jobs, summary

from rlhfless_operator.platforms.base import InstanceState, StateChange
from tests.controller.operator_harness import job_server
from tests.prerequisites import needs_api_server


def timeline(*changes: tuple[str, str, InstanceState, float]) -> Timeline:
    made = Timeline()
    made.placed("actor", ["a"])
    made.placed("learner", ["a", "b"])
    for job, pod, state, at in changes:
        made.observe(job, StateChange(pod, "learning" if pod == "learner" else "generation", state, at))
    return made


def test_shares_are_of_the_time_of_all_slots() -> None:
    made = timeline(
        ("one", "actor", "asleep", 0.0),
        ("one", "actor", "busy", 0.0),
        ("one", "actor", "switching", 4.0),
        ("one", "actor", "asleep", 5.0),
        ("other", "learner", "asleep", 0.0),
        ("other", "learner", "switching", 5.0),
        ("other", "learner", "busy", 6.0),
        ("other", "learner", "idle", 9.0),
        ("other", "learner", "ended", 10.0),
    )
    shares = made.shares(2, 0.0, 10.0)
    assert shares == pytest.approx({"busy": 0.5, "switching": 0.15, "idle": 0.1, "draining": 0.0, "free": 0.25})
    assert made.shares(2, 0.0, 10.0, job="one")["busy"] == pytest.approx(0.2)
    assert made.shares(2, 6.0, 9.0)["busy"] == 1.0
    assert made.first_work("other", "learning") == 6.0
    hands = made.changes_of_hands(scale=0.5)
    assert (hands["count"], hands["mean"]) == (1, pytest.approx(4.0)), (
        "one second to sleep and one to wake, at half speed"
    )


@needs_api_server("no operator runs jobs")
async def test_two_jobs_in_turns_end_and_no_slot_has_two_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting("paper-3b-gsm8k-grpo", slots=2, learner_gpus=1, steps=1, startup=1.0, time_scale=0.02)
    made: list[Timeline] = []

    class Kept(Timeline):
        def __post_init__(self) -> None:
            made.append(self)

    monkeypatch.setattr("benchmarks.slots.Timeline", Kept)
    with job_server(tmp_path) as server:
        monkeypatch.setitem(os.environ, "KUBECONFIG", str(server.kubeconfig))
        alone = await run_jobs(server, tmp_path, setting, 2, "alone")
        together = await run_jobs(server, tmp_path, setting, 2, "in turns")
    assert set(together["seconds"]) == {"job-0", "job-1"}
    for slot in ("rlhfless-default-0-0", "rlhfless-default-1-0"):
        spans = sorted((each.start, each.end, each.job) for each in made[-1].work_on(slot))
        assert {job for *_, job in spans} == {"job-0", "job-1"}
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    sequence, turns = summary({"alone": alone, "2 in turns": together}, [2])
    assert sequence["seconds"] == pytest.approx(sum(alone["seconds"].values()))
    assert turns["times_as_fast"] == pytest.approx(sequence["seconds"] / turns["seconds"])
