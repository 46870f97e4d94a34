"""`samples.jsonl`: what the policy wrote over training, each step exactly once, also after kills."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import ExampleSample, SampleTask
from rlhfless_operator.training.journal import samples
from rlhfless_operator.training.journal.samples import SamplesFile, bounded, kept_examples, training_examples
from tests.command_line import run_command
from tests.training.whole_jobs import MakeJob, folder_of, run_job


def example(row: int = 0, index: int = 0, response: str = "r") -> ExampleSample:
    return ExampleSample(
        row=row, index=index, prompt="p", response=response, reward=1.0, tokens=1, finish_reason="stop"
    )


def lines_of(uri: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in artifacts.read_bytes(uri).splitlines()]


def samples_of(file: Path, when: str = "training") -> list[dict[str, Any]]:
    lines = lines_of(str(folder_of(file) / "samples.jsonl"))
    return [line for line in lines if line["when"] == when]


# --- jobs --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
def test_a_job_keeps_a_group_of_each_step(tiny_job: MakeJob) -> None:
    file = tiny_job(evaluation={"data": {"source": "train.jsonl"}})
    run_job(file)
    lines = samples_of(file)
    assert [(line["step"], line["index"]) for line in lines] == [(s, i) for s in (1, 2, 3) for i in range(4)]
    for step in (1, 2, 3):
        group = [line for line in lines if line["step"] == step]
        assert len({line["row"] for line in group}) == 1
        assert {line["version"] for line in group} == {step - 1}
        assert len({line["response"] for line in group}) > 1
        for line in group:
            assert line["prompt"].endswith("=")
            assert line["terms"] == {"digits": line["reward"]}
            assert line["finish_reason"] in ("stop", "truncated")
            assert line["tokens"] > 0
        rewards = [line["reward"] for line in group]
        best = rewards.index(max(rewards))
        assert group[best]["advantage"] == max(line["advantage"] for line in group) > 0
    assert [line["when"] for line in lines_of(str(folder_of(file) / "samples.jsonl"))] == [
        *["before"] * 8,
        *["training"] * 12,
        *["after"] * 8,
    ]
    report = (folder_of(file) / "report.html").read_text()
    assert "Samples of training" in report
    assert f"step 3, prompt {lines[-1]['row']}" in report


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
def test_how_many_groups_are_kept_is_the_jobs_to_say(tiny_job: MakeJob) -> None:
    none = tiny_job("none", steps=1, tracking={"sampleGroups": 0})
    run_job(none)
    assert not (folder_of(none) / "samples.jsonl").exists()
    more = tiny_job(
        "more", steps=1, tracking={"sampleGroups": 3}, batch={"samplesPerPrompt": 12, "minibatchSamples": 8}
    )
    run_job(more)
    groups = {line["row"]: [] for line in samples_of(more)}
    for line in samples_of(more):
        groups[line["row"]].append(line["index"])
    assert list(groups.values()) == [list(range(8))] * 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("cold_start")
@pytest.mark.nightly
def test_kills_change_nothing_of_the_samples(tiny_job: MakeJob, tmp_path: Path) -> None:
    steps = 4
    undisturbed = tiny_job("undisturbed", steps=steps)
    run_job(undisturbed)
    file = tiny_job("killed", steps=steps)
    status, kept = folder_of(file) / "status.json", folder_of(file) / "samples.jsonl"
    log = (tmp_path / "log.txt").open("wb")

    def step() -> int:
        return int(json.loads(status.read_text())["step"] or 0) if status.exists() else 0

    for killed_in in range(1, 4):
        driver = subprocess.Popen(run_command(file), stdout=log, stderr=log)
        # At various places of a step; some of them between the samples' writing and the status's.
        while driver.poll() is None and step() < killed_in:
            time.sleep(0.01)
        time.sleep(0.1 * (killed_in % 3))
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    # A driver that was killed just after it had written the samples of a step that then does not count.
    lines = lines_of(str(kept))
    kept.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {**lines[-1], "step": step() + 1}]))
    run_job(file)
    assert samples_of(file) == samples_of(undisturbed)
    assert {line["step"] for line in samples_of(file)} == set(range(1, steps + 1))


# --- the file ----------------------------------------------------------------------------------------------------


def test_a_step_that_is_written_again_is_there_once_in_every_store(store: str) -> None:
    uri = artifacts.join(store, "samples.jsonl")
    for step in (1, 2, 2, 3, 2):
        SamplesFile(uri).put("training", step, [example(step, index) for index in range(2)])
    SamplesFile(uri).put("before", 0, [example()])
    SamplesFile(uri).put("after", 2, [example()])
    # The job was made longer.
    SamplesFile(uri).put("after", 3, [example()])
    assert [(line["when"], line["step"], line["index"]) for line in lines_of(uri)] == [
        ("before", 0, 0),
        *(("training", step, index) for step in (1, 2, 3) for index in (0, 1)),
        ("after", 3, 0),
    ]


def test_a_damaged_line_costs_itself_alone(tmp_path: Path) -> None:
    uri = str(tmp_path / "samples.jsonl")
    SamplesFile(uri).put("training", 1, [example()])
    Path(uri).write_text(Path(uri).read_text() + '{"when": "trai\n[]\n{}\n')
    SamplesFile(uri).put("training", 2, [example()])
    assert [line["step"] for line in lines_of(uri)] == [1, 2]


def test_the_size_of_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_BYTES", 10_000)
    uri, again = (str(tmp_path / name) for name in ("samples.jsonl", "again.jsonl"))
    SamplesFile(uri).put("before", 0, [example()])
    SamplesFile(again).put("before", 0, [example()])
    for step in range(1, 101):
        SamplesFile(uri).put("training", step, [example(response="x" * 500)])
        for _ in range(1 + step % 2):
            SamplesFile(again).put("training", step, [example(response="x" * 500)])
        assert Path(uri).stat().st_size <= 10_000
    steps = [line["step"] for line in lines_of(uri)]
    assert steps[:2] == [0, 1]
    assert steps[-1] == 100
    # Each part of the run is still there.
    assert all(any(begin <= step <= begin + 32 for step in steps) for begin in range(0, 100, 32))
    assert Path(uri).read_text() == Path(again).read_text()


def test_one_step_of_more_than_all_that_there_is_room_for_stays() -> None:
    lines = [{"when": "training", "step": 7, "response": "x" * 100}]
    assert bounded(lines, 10) == lines
    assert bounded([], 10) == []


# --- the choice --------------------------------------------------------------------------------------------------


def test_the_groups_that_were_drawn_first_are_kept() -> None:
    assert training_examples([5, 2, 9], 2, 3) == {SampleTask(prompt=p, index=i) for p in (5, 2) for i in range(3)}
    assert training_examples([5], 0, 3) == frozenset()
    assert len(training_examples([5], 1, 1024)) == 8


def test_of_several_rounds_the_groups_that_are_learnt_from_come_first() -> None:
    examples = [example(row, index) for row in (9, 4, 1) for index in (1, 0)]
    batch = [SampleTask(prompt=prompt, index=index) for prompt in (8, 4, 1) for index in range(2)]
    kept = kept_examples([*examples, examples[0]], batch, 2)
    assert [(each.row, each.index) for each in kept] == [(4, 0), (4, 1), (1, 0), (1, 1)]
    assert [each.row for each in kept_examples(examples, batch, 3)][-1] == 9
