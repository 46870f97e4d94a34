"""Whole jobs on this machine that generate with vLLM."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from rlhfless_functions import artifacts
from tests.command_line import run_command, run_to_its_end
from tests.generation.engines.shares import save_model

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
