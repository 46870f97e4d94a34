"""Whole jobs on this machine that generate with vLLM."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from rlhfless_functions import artifacts
from tests.command_line import run_command, run_to_its_end
from tests.generation.engines.shares import save_model
from tests.training.asynchronous.test_loop import check_journal, replayed
from tests.training.test_switching import SWITCHING, check_switched
from tests.training.test_switching import switches_midway as switches_midway  # A fixture.
from tests.training.whole_jobs import records_of, run_job

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")


@pytest.mark.parametrize(
    ("dtype", "lora", "most"),
    [("float32", None, 1.01), ("bfloat16", None, 1.05), ("float32", {"rank": 4}, 1.01)],
    ids=["float32", "bfloat16", "an adapter"],
)
def test_a_job_trains_on_vllm_with_its_log_probs_beside_the_trainers(
    tiny_job: Callable[..., Path],
    tiny_model: Path,
    tmp_path: Path,
    dtype: str,
    lora: dict[str, int] | None,
    most: float,
) -> None:
    model = {"source": str(save_model(tmp_path / "model", tiny_model)), "dtype": dtype, "lora": lora}
    job = tiny_job(model=model, generation={"engine": "vllm", "instances": {"min": 1, "max": 1}}, steps=2)
    assert "generation runs on vllm (" in run_to_its_end(job)
    name = yaml.safe_load(job.read_text())["metadata"]["name"]
    lines = artifacts.read_bytes(str(tmp_path / "runs" / name / "metrics.jsonl")).decode().splitlines()
    records = [yaml.safe_load(line) for line in lines]
    gaps = {record["step"]: record["metrics"]["mismatch/mean_exp_abs"] for record in records if record["step"]}
    assert gaps.keys() == {1, 2}
    assert all(1 <= gap < most for gap in gaps.values())


def test_a_job_goes_on_when_its_instance_of_vllm_is_killed_in_mid_stream(
    tiny_job: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "model", tiny_model, max_position_embeddings=1024)
    job = tiny_job(
        model={"source": str(source), "dtype": "float32"},
        generation={"engine": "vllm", "instances": {"min": 1, "max": 1}, "flush": "0.1s"},
        sampling={"maxPromptTokens": 16, "maxResponseTokens": 400},
        steps=1,
    )
    folder, log = tmp_path / "runs" / "tiny", tmp_path / "log.txt"
    with log.open("w") as output:
        driver = psutil.Popen(run_command(job), stdout=output, stderr=output)
        while not list((folder / "rollouts").rglob("*.parquet")):
            assert driver.poll() is None, log.read_text()
            time.sleep(0.005)
        (victim,) = (each for each in driver.children(recursive=True) if each.name().startswith("generation-"))
        victim.kill()
        assert driver.wait() == 0, log.read_text()
    (line,) = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = yaml.safe_load(line)["metrics"]
    assert metrics["generation/lost_instances"] == 1
    assert metrics["batch/samples"] == 16
    # What two instances have made between them is what one model would have.
    assert metrics["mismatch/mean_exp_abs"] < 1.01


@pytest.mark.usefixtures("switches_midway")
def test_responses_go_on_with_newer_weights_and_the_keys_and_values_of_older_ones(
    tiny_job: Callable[..., Path], tiny_model: Path, tmp_path: Path
) -> None:
    source = save_model(tmp_path / "model", tiny_model, max_position_embeddings=1024)
    settings = {
        "model": {"source": str(source), "dtype": "float32"},
        "generation": {"engine": "vllm", "instances": {"min": 1, "max": 1}, "flush": "1ms", "keepAlive": "10m"},
        "async": {"maxStaleness": 1, "newWeights": "switch", "kvCache": "keep"},
        "sampling": {"maxPromptTokens": 64, "maxResponseTokens": 160},
    }
    job = tiny_job(**{**SWITCHING, **settings}, steps=2)
    # vLLM keeps whole blocks, so prompts have more than one.
    prompts = [{"prompt": "+".join("0123" * 5) + f"{number}=", "ground_truth": number} for number in range(8)]
    (job.parent / "train.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    assert run_job(job)["phase"] == "Succeeded"
    assert check_switched(job, 2, 1) > 0
    metrics = [record["metrics"] for record in records_of(job)]
    assert [each["generation/lost_instances"] for each in metrics] == [0, 0]
    assert sum(each["generation/kept_responses"] for each in metrics) > 0
    assert sum(each["generation/kept_tokens"] for each in metrics) > 0
    assert "2 steps taken again: the same weights bit for bit" in replayed(job)


@pytest.mark.parametrize(
    "lora", [None, pytest.param({"rank": 4}, marks=pytest.mark.nightly)], ids=["full weights", "an adapter"]
)
def test_responses_of_one_batch_after_the_other_keep_the_weights_that_they_began_with(
    tiny_job: Callable[..., Path], tiny_model: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    job = tiny_job(
        model={"source": str(save_model(tmp_path / "model", tiny_model)), "dtype": "float32", "lora": lora},
        generation={"engine": "vllm", "instances": {"min": 1, "max": 1}, "keepAlive": "10m"},
        checkpoints={"keepRollouts": True},
        limits={"stall": "250s"},
        steps=4,
        **{"async": {"maxStaleness": 1}},
    )
    assert run_job(job)["phase"] == "Succeeded"
    assert max(check_journal(job, 4, 1)) > 0, "newer weights were swapped in"
    metrics = [record["metrics"] for record in records_of(job) if record["step"]]
    assert [each["generation/lost_instances"] for each in metrics] == [0] * 4
    assert all(each["mismatch/mean_exp_abs"] < 1.2 for each in metrics)
    assert "4 steps taken again: the same weights bit for bit" in replayed(job)
