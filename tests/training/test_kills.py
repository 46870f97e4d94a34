"""`kill -9` of anything at any moment: training ends with the weights of the undisturbed run, and nothing is left."""

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests.command_line import run_command

KILLS = 20
STEPS = 8
VICTIMS = ["driver", "generation", "preparation", "learning", "reward"]


def start(file: Path, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as output:
        return subprocess.Popen(run_command(file), stdout=output, stderr=output)


def folder_of(file: Path) -> Path:
    return file.parent.parent / "runs" / file.parent.name


def final_weights(file: Path) -> dict[str, torch.Tensor]:
    status = json.loads((folder_of(file) / "status.json").read_text())
    assert status["phase"] == "Succeeded", status
    return load_file(Path(status["weights"]["uri"]) / "model.safetensors")


def victims_of(driver: subprocess.Popen[bytes], kind: str) -> list[psutil.Process]:
    """The living processes of one kind below a driver."""
    found = []
    for process in psutil.Process(driver.pid).children(recursive=True):
        try:
            name, command = process.name(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        if kind == "reward":
            if "rlhfless_functions.rewards" in command:
                found.append(process)
        elif name.startswith(f"{kind}-"):
            found.append(process)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_twenty_kills_change_nothing(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    settings = {"steps": STEPS, "checkpoints": {"everySteps": 3}, "limits": {"retries": 10}}
    settings |= {"batch": {"promptsPerStep": 6, "samplesPerPrompt": 6, "minibatchSamples": 12}}
    undisturbed = tiny_job("undisturbed", **settings)
    log = tmp_path / "log.txt"
    assert start(undisturbed, log).wait() == 0, log.read_text()

    file = tiny_job("killed", **settings)
    chance = random.Random(20)
    killed: Counter[str] = Counter()
    started: list[psutil.Process] = []
    driver = start(file, log)
    deadline = time.monotonic() + 900
    while killed.total() < KILLS and time.monotonic() < deadline:
        if driver.poll() is not None:
            assert driver.returncode in (0, -signal.SIGKILL), log.read_text()
            if driver.returncode == 0:
                break
            driver = start(file, log)
        kind = min(VICTIMS, key=lambda victim: (killed[victim], chance.random()))
        time.sleep(chance.uniform(0.0, 0.2))
        if kind == "driver":
            if not victims_of(driver, chance.choice(["generation", "preparation", "learning"])):
                continue
            started += psutil.Process(driver.pid).children(recursive=True)
            driver.kill()
            driver.wait()
            killed[kind] += 1
        else:
            for process in victims_of(driver, kind)[:1]:
                process.kill()
                killed[kind] += 1
    while driver.wait() == -signal.SIGKILL:
        driver = start(file, log)
    assert driver.returncode == 0, log.read_text()[-4000:]

    assert killed.total() >= KILLS, f"only {dict(killed)} were killed before the job ended"
    expected, actual = final_weights(undisturbed), final_weights(file)
    for name, tensor in expected.items():
        assert torch.equal(tensor, actual[name]), name
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
    psutil.wait_procs(started, timeout=10)
    assert [process for process in started if process.is_running()] == []
