"""`rlhfless convert`, and the jobs that it writes, which train."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.command_line import run_to_its_end

TRL = """\
model_name_or_path: {model}
dataset_name: train.jsonl
reward_funcs: [reward.reward]
output_dir: runs/theirs
learning_rate: 1e-3
max_steps: 4
warmup_ratio: 0.5
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 4
num_generations: 4
max_completion_length: 16
beta: 0.01
gradient_checkpointing: false
logging_steps: 1
log_completions: true
"""

VERL = """\
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.jsonl \\
    data.train_batch_size=4 data.max_prompt_length=16 data.max_response_length=16 \\
    actor_rollout_ref.model.path={model} actor_rollout_ref.rollout.dtype=float32 \\
    actor_rollout_ref.rollout.n=4 actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
    actor_rollout_ref.actor.optim.lr=1e-3 custom_reward_function.path=verl_reward.py \\
    trainer.experiment_name=theirs trainer.total_training_steps=2
"""

VERL_REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
)


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhfless_operator", "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [("theirs.yaml", TRL), ("theirs.sh", VERL)])
def test_a_converted_job_trains_to_its_end(
    tiny_job: Callable[..., Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    folder = tiny_job().parent
    monkeypatch.chdir(folder)
    (folder / name).write_text(text.format(model=tiny_model))
    (folder / "verl_reward.py").write_text(VERL_REWARD)
    result = convert(name, "--output", "theirs-job.yaml")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    run_to_its_end(folder / "theirs-job.yaml")
    run = folder / "runs" / "theirs"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spec = yaml.safe_load((run / "job.yaml").read_text())["spec"]
    assert (run / "model" / "config.json").is_file()
    assert (spec["steps"], spec["batch"]["promptsPerStep"], spec["batch"]["minibatchSamples"]) == (2, 4, 8)
    assert max(step["step"] for step in steps) == 2


def test_the_job_goes_to_the_output_and_the_table_to_standard_error(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(TRL.format(model="org/model"))
    result = convert(str(file), "--processes", "4")
    assert result.returncode == 0
    assert yaml.safe_load(result.stdout)["spec"]["batch"]["promptsPerStep"] == 16
    assert result.stdout.startswith(
        "# From grpo.yaml, by what its fields and its defaults mean in TRL 1.16 with 4 proc"
    )
    assert "warmup_ratio: 0.5" in result.stderr
    assert "→ spec.optimizer.warmupSteps: 1 " in result.stderr
    assert "logging_steps: 1" in result.stderr


def test_nothing_is_overwritten_and_bad_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "grpo.yaml"
    file.write_text(TRL)
    result = convert(str(file), "--output", str(file))
    assert (result.returncode, result.stderr) == (1, f"error: {file} already exists; name another file\n")
    assert convert(str(tmp_path / "none.yaml")).stderr.startswith(f"error: {tmp_path}/none.yaml can't be read")
