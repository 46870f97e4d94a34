"""`kill -9` of anything at any moment: training ends with the weights of the undisturbed run, and nothing is left."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.command_line import run_command
from tests.training.killing import run_killing, start
from tests.training.whole_jobs import assert_same_final_weights, folder_of

KILLS = 20
STEPS = 8


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_twenty_kills_change_nothing(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    settings = {"steps": STEPS, "checkpoints": {"everySteps": 3}, "limits": {"retries": 10}}
    settings |= {"batch": {"promptsPerStep": 6, "samplesPerPrompt": 6, "minibatchSamples": 12}}
    undisturbed = tiny_job("undisturbed", **settings)
    log = tmp_path / "log.txt"
    assert start(run_command(undisturbed), log).wait() == 0, log.read_text()

    file = tiny_job("killed", **settings)
    killed = run_killing(run_command(file), log, random.Random(20), kills=KILLS, pause=0.2, patience=900)

    assert killed.victims.total() >= KILLS, f"only {dict(killed.victims)} were killed before the job ended"
    assert_same_final_weights(file, undisturbed)
    for run in (undisturbed, file):
        records = [json.loads(line) for line in (folder_of(run) / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    rewards = [
        [json.loads(line)["metrics"]["reward"] for line in (folder_of(run) / "metrics.jsonl").read_text().splitlines()]
        for run in (undisturbed, file)
    ]
    # Chunks are added up in the order in which they were ready.
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-12), "the same prompts in the same steps"
    versions = [path for kind in ("weights", "checkpoints") for path in (folder_of(file) / kind).glob("*")]
    assert all((path / "manifest.json").exists() for path in versions)
    psutil.wait_procs(killed.orphans, timeout=10)
    assert [process for process in killed.orphans if process.is_running()] == []
