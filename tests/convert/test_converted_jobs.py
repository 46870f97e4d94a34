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

TRL_COMMAND = """\
accelerate launch --num_processes 1 train_grpo.py --model_name_or_path {model} --dataset_name train.jsonl \\
    --reward_funcs reward.reward --output_dir runs/theirs --learning_rate 1e-3 --max_steps $((2 * 2)) \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --steps_per_generation 4 --num_generations 4 \\
    --max_completion_length 16 --gradient_checkpointing false
"""

TRL_SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from reward import reward

STEPS = 2
config = GRPOConfig(
    output_dir="runs/theirs", learning_rate=1e-3, max_steps=STEPS * 2, per_device_train_batch_size=4,
    gradient_accumulation_steps=2, steps_per_generation=4, num_generations=4, max_completion_length=16,
    gradient_checkpointing=False,
)
train = load_dataset("json", data_files="train.jsonl", split="train")
GRPOTrainer(model="{model}", reward_funcs=[reward], args=config, train_dataset=train).train()
"""

OPENRLHF = """\
ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --pretrain {model} --remote_rm_url scores.py \\
    --prompt_data train.jsonl --input_key prompt --apply_chat_template --save_path runs/theirs --rollout_batch_size 4 \\
    --n_samples_per_prompt 4 --train_batch_size 8 --prompt_max_len 16 --generate_max_len 16 \\
    --advantage_estimator group_norm --init_kl_coef 0 --actor_learning_rate 1e-3 --num_episodes 1
"""

VERL_REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str)\n"
)

OPENRLHF_REWARD = "def reward_func(queries, prompts, labels):\n    return [float(len(query)) for query in queries]\n"


def convert(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rlhfless_operator", "convert", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


FILES = [
    ("theirs.yaml", TRL),
    ("theirs.sh", VERL),
    ("command.sh", TRL_COMMAND),
    ("script.py", TRL_SCRIPT),
    ("ray.sh", OPENRLHF),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"), [FILES[0], *(pytest.param(*each, marks=pytest.mark.nightly) for each in FILES[1:])]
)
def test_a_converted_job_trains_to_its_end(
    tiny_job: Callable[..., Path], tiny_model: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    folder = tiny_job().parent
    monkeypatch.chdir(folder)
    (folder / name).write_text(text.format(model=tiny_model))
    (folder / "verl_reward.py").write_text(VERL_REWARD)
    (folder / "scores.py").write_text(OPENRLHF_REWARD)
    result = convert(name, "--output", "theirs-job.yaml")
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    settings = yaml.safe_load((folder / "theirs-job.yaml").read_text())
    if text == OPENRLHF:  # its length is in epochs
        settings["spec"] |= {"steps": settings["spec"].pop("epochs") * 2}
        (folder / "theirs-job.yaml").write_text(yaml.safe_dump(settings))
    checked = subprocess.run(
        [sys.executable, "-m", "rlhfless_operator", "validate", "theirs-job.yaml"], capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
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
