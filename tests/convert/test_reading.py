"""What is read of a configuration: the command of a script, flags, Python's syntax, and what a run alone can tell."""

from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.convert import Configuration, UnreadableConfigurationError, convert, job_yaml, read_configuration
from rlhfless_operator.convert.conversion import Conversion, Left, Unknown
from rlhfless_operator.job.reading.validation import parse_job

VERL = "python3 -m verl.trainer.main_ppo"


def read(folder: Path, name: str, text: str) -> Configuration:
    (folder / name).write_text(text)
    return read_configuration(folder / name)


def converted(folder: Path, name: str, text: str) -> Conversion:
    conversion = convert(read(folder, name, text), name)
    parse_job(job_yaml(conversion))
    return conversion


def left(conversion: Conversion) -> dict[str, str]:
    return {line.theirs: line.outcome.reason for line in conversion.left if isinstance(line.outcome, Left)}


def value(conversion: Conversion, path: str) -> Any:
    found: Any = conversion.document["spec"]
    for name in path.split("."):
        found = found[name]
    return found


# --- shell scripts ---


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.x=1e-6", 1e-6),
        ("data.x=True", True),
        ("data.x=null", None),
        ("data.x=12:30", "12:30"),
        ("data.x=on", "on"),
        ("""data.x='["a","b"]'""", ["a", "b"]),
        ("""data.x="['$HOME/a','~/b']" """, ["~/a", "~/b"]),
        ("data.x=$HOME/a", "~/a"),
        ("+data.x=a=b", "a=b"),
        ("++data.x='a b: c'", "a b: c"),
        ("data.x=[1,2]", [1, 2]),
        ("data.x=a data.x=b", "b"),
    ],
)
def test_a_value_is_what_hydra_reads(word: str, expected: Any, tmp_path: Path) -> None:
    assert read(tmp_path, "run.sh", f"{VERL} {word} trainer.nnodes=1").fields["data.x"] == expected


def test_a_mapping_sets_the_fields_below_its_name(tmp_path: Path) -> None:
    fields = read(tmp_path, "run.sh", f"{VERL} 'algorithm.kl_ctrl={{type: fixed, kl_coef: 0.1}}'").fields
    assert fields == {"algorithm.kl_ctrl.type": "fixed", "algorithm.kl_ctrl.kl_coef": 0.1}


def test_what_is_known_only_when_a_script_runs_is_left_and_named(tmp_path: Path) -> None:
    script = f"""
        GPUS=$(nvidia-smi -L | wc -l)
        {VERL} actor_rollout_ref.model.path=$1 data.train_files="$DATA/train.parquet" trainer.n_gpus_per_node=$GPUS \\
            data.train_batch_size=$((GPUS * 8)) actor_rollout_ref.rollout.n=4 $EXTRA
    """
    conversion = converted(tmp_path, "run.sh", script)
    reasons = left(conversion)
    assert "the script does not set 1" in reasons["actor_rollout_ref.model.path"]
    assert "the script does not set DATA" in reasons["data.train_files"]
    assert "$(nvidia-smi -L | wc -l) is the output of a command" in reasons["data.train_batch_size"]
    assert "trainer.n_gpus_per_node" not in reasons, "it has no effect on a job"
    assert "(data.train_batch_size)" in reasons["actor_rollout_ref.actor.ppo_mini_batch_size"], "it was read for it"
    assert "the script does not set EXTRA" in conversion.lost["…"]
    assert "# Left to you:" in job_yaml(conversion)


def test_overrides_that_bash_does_not_pass_are_named(tmp_path: Path) -> None:
    script = f"{VERL} data.train_batch_size=8 \\\n    # a comment\n    trainer.total_epochs=3 \\\n    data.seed=1\n"
    conversion = converted(tmp_path, "run.sh", script)
    assert conversion.lost.keys() == {"trainer.total_epochs=3", "data.seed=1"}
    assert value(conversion, "epochs") == 30, "verl's default, as in the script's run"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.sh", f"{VERL} data.seed=1\n{VERL} data.seed=2", r"starts 2 trainings \(lines 1, 2\)"),
        ("run.sh", f"for s in 1 2; do {VERL} data.seed=$s; done", "starts 2 trainings"),
        ("run.sh", "python3 train_sft.py", "starts no training that is known"),
        ("run.sh", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a", "starts no training that is known"),
        ("run.sh", f"{VERL} data.seed='1", "can't be read as a shell script"),
        ("run.sh", "trl grpo --config grpo.yaml", "takes its fields from grpo.yaml, which is not here"),
        (
            "zero3.yaml",
            "machine_rank: 0\nmixed_precision: bf16\nnum_processes: 8",
            "none of TRL's GRPO",
        ),
        (".pre-commit-config.yaml", "ci: {}\nrepos: []", r"\(ci, repos\).*name its framework with --from"),
        ("critic.yaml", "_target_: verl.Critic\nstrategy: fsdp\noptim: {lr: 1e-5}", "has none of verl's sections"),
        (
            "sft.yaml",
            "model_name_or_path: a/b\nlearning_rate: 1e-5\npacking: true",
            "another training than GRPO.*packing",
        ),
        ("dpo.yaml", "model_name_or_path: a/b\nbeta: 0.1\nmax_length: 9", "another training than GRPO.*max_length"),
        ("train.py", "x = (", "is no Python"),
        ("train.py", "print(1)", "has no GRPOConfig"),
        ("train.py", "GRPOConfig(seed=1)\nGRPOConfig(seed=2)", r"has 2 GRPOConfig\(...\) \(lines 1, 2\)"),
    ],
)
def test_what_can_not_be_read_is_refused_with_the_remedy(name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableConfigurationError, match=message):
        read(tmp_path, name, text)


@pytest.mark.parametrize(
    "text",
    ["learning_rate: 1e-5", "my_own: 1\nbeta: 0.1", "packing: true\nnum_generations: 8", "num_processes: 8\nbeta: 0"],
)
def test_yaml_of_grpo_needs_no_more_than_its_fields(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, "grpo.yaml", text).peer == "trl"


def test_whoever_names_the_framework_is_believed(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("mine: 1\nyours: 2\npacking: true")
    assert read_configuration(tmp_path / "own.yaml", "trl").peer == "trl"


def test_the_same_training_twice_is_one(tmp_path: Path) -> None:
    script = f'if [ -f x ]; then {VERL} data.seed=1; else {VERL} data.seed=1; fi; echo "data.seed=2"'
    assert read(tmp_path, "run.sh", script).fields == {"data.seed": 1}


@pytest.mark.parametrize(
    ("command", "processes"),
    [
        ("accelerate launch --num_processes 4 train.py", 4),
        ("accelerate launch --config_file zero3.yaml train.py", 8),
        ("accelerate launch train.py", None),
        ("torchrun --nproc_per_node=2 --nnodes 2 -m trl.scripts.grpo", 4),
        ("python train.py", 1),
        ("trl grpo --num_processes 3", 3),
    ],
)
def test_the_launcher_says_how_many_processes_there_are(command: str, processes: int | None, tmp_path: Path) -> None:
    (tmp_path / "zero3.yaml").write_text("num_processes: 8\n")
    configuration = read(tmp_path, "run.sh", f"{command} --num_generations 4 --loss_type grpo")
    assert (configuration.peer, configuration.processes) == ("trl", processes)


def test_flags_come_before_the_file_that_they_name(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "recipes" / "grpo.yaml").write_text("learning_rate: 1e-5\nbeta: 0.1\nreward_funcs: [a.b]\n")
    flags = "--config recipes/grpo.yaml --beta 0.2 --reward_funcs x.y z.w --bf16"
    script = f"accelerate launch --num_processes 2 grpo.py {flags}"
    fields = read(tmp_path / "scripts", "run.sh", script).fields
    assert fields["beta"] == 0.2
    assert (fields["learning_rate"], fields["reward_funcs"], fields["bf16"]) == ("1e-5", ["x.y", "z.w"], True)


def test_without_the_number_of_processes_the_batch_is_left(tmp_path: Path) -> None:
    given = Configuration("trl", {"per_device_train_batch_size": 8})
    assert "convert with --processes" in left(convert(given, "grpo.yaml"))["per_device_train_batch_size"]
    assert "per_device_train_batch_size" not in left(convert(given, "grpo.yaml", 2))


# --- YAML ---


def test_references_between_verl_s_fields_are_followed(tmp_path: Path) -> None:
    text = """
        data: {train_files: a.parquet, max_prompt_length: 64, max_response_length: "${data.max_prompt_length}"}
        trainer: {experiment_name: "run-${data.train_batch_size}", total_training_steps: "${oc.env:STEPS,7}"}
        actor_rollout_ref: {model: {path: "${oc.env:MODEL}"}}
    """
    conversion = converted(tmp_path, "ppo.yaml", text)
    assert value(conversion, "sampling.maxResponseTokens") == 64
    assert value(conversion, "steps") == 7
    assert conversion.document["metadata"]["name"] == "run-1024"
    assert "MODEL is set where it runs" in left(conversion)["actor_rollout_ref.model.path"]


# --- Python ---

SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward
from mine.rewards import brevity

SIZE = 4
NAMES = {"lr": 2e-6}

def own(completions, **columns):
    return [0.0 for _ in completions]

def main(args):
    config = GRPOConfig(
        output_dir=f"out/run-{SIZE}", learning_rate=2 * 1e-6, per_device_train_batch_size=SIZE * 2,
        num_generations=SIZE, max_steps=args.steps, seed=NAMES, beta=-(-0.04),
    )
    data = load_dataset("org/tasks", "main", split="train")
    lora = LoraConfig(r=64, target_modules=["q_proj"])
    trainer = GRPOTrainer(
        model="org/model", reward_funcs=[accuracy_reward, brevity, own], args=config, train_dataset=data,
        peft_config=lora, callbacks=[Stop()],
    )
"""


def test_a_python_script_is_read_as_syntax(tmp_path: Path) -> None:
    configuration = read(tmp_path, "train.py", SCRIPT)
    fields = configuration.fields
    assert (fields["output_dir"], fields["learning_rate"], fields["per_device_train_batch_size"]) == (
        "out/run-4",
        2e-6,
        8,
    )
    assert isinstance(fields["max_steps"], Unknown)
    assert fields["reward_funcs"] == ["accuracy_reward", "mine.rewards.brevity", "train.own"]
    assert (fields["dataset_name"], fields["dataset_config"], fields["dataset_train_split"]) == (
        "org/tasks",
        "main",
        "train",
    )
    assert (fields["use_peft"], fields["lora_r"], fields["lora_alpha"], fields["lora_dropout"]) == (True, 64, 8, 0.0)
    assert "callbacks=[Stop()]" in configuration.lost
    conversion = converted(tmp_path, "train.py", SCRIPT)
    assert "args.steps is known only when the script runs" in left(conversion)["max_steps"]
    assert "move it into a file that trains nothing" in left(conversion)["reward_funcs"]


AGENT = """
from trl import GRPOConfig, GRPOTrainer
from games.maze import Maze
from lib import tools as helpers

def search(query: str) -> str:
    ...

TOOLS = [search, helpers.fetch]
GRPOTrainer(model="m", train_dataset="d", args=GRPOConfig(max_tool_calling_iterations=3), tools=TOOLS,
            environment_factory=Maze, reward_funcs=[])
"""


def test_tools_and_the_environment_of_a_script_are_named(tmp_path: Path) -> None:
    fields = read(tmp_path, "agent.py", AGENT).fields
    assert fields["tools"] == ["agent.search", "helpers.fetch"]
    assert fields["environment_factory"] == "games.maze.Maze"
    conversion = converted(tmp_path, "agent.py", AGENT)
    assert "search is in the script itself: move it into a file that trains nothing" in left(conversion)["tools"]
    made = read(tmp_path, "agent.py", AGENT.replace("=Maze,", "=lambda: Maze(8),")).fields["environment_factory"]
    assert isinstance(made, Unknown)


def test_a_data_set_that_a_script_changes_is_left(tmp_path: Path) -> None:
    script = 'GRPOConfig()\nGRPOTrainer(train_dataset=load_dataset("org/tasks", split="train").map(prepare), model="m")'
    conversion = converted(tmp_path, "train.py", script)
    assert "changes its rows by .map(prepare): write a function prepare" in left(conversion)["datasets"]
    written = {"source": "hub:org/tasks", "split": "train", "map": {"file": "rows.py", "function": "prepare"}}
    assert conversion.document["spec"]["data"].items() >= written.items()


# --- verl's meanings ---


@pytest.mark.parametrize(
    ("overrides", "path", "expected"),
    [
        ("", "evaluation.sampling.temperature", 0.0),
        ("actor_rollout_ref.rollout.val_kwargs.n=8", "evaluation.samplesPerPrompt", 1),
        (
            "actor_rollout_ref.rollout.val_kwargs.{n=8,temperature=0.6,do_sample=True}",
            "evaluation.samplesPerPrompt",
            8,
        ),
        (
            "data.apply_chat_template_kwargs.enable_thinking=False",
            "data.chatTemplateKwargs",
            {"enable_thinking": False},
        ),
        ("data.prompt_key=question", "evaluation.data.promptColumn", "question"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "algorithm.clipLow", 0.181269246922),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean", "algorithm.clip", "gmpo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=sapo", "algorithm.aggregation", "seq-mean-token-mean"),
        ("actor_rollout_ref.actor.{policy_loss.loss_mode=cispo,clip_ratio_low=10}", "algorithm.clipLow", 1.0),
        ("actor_rollout_ref.actor.tis_imp_ratio_cap=2", "algorithm.importanceSampling.high", 2.0),
        (
            "algorithm.rollout_{is=True,is_threshold=2.0,is_level=sequence}",
            "algorithm.importanceSampling.mode",
            "truncate",
        ),
        ("algorithm.rollout_correction.bypass_mode=True", "algorithm.proximalPolicy", "sampler"),
    ],
)
def test_verl_s_fields_keep_their_meaning(overrides: str, path: str, expected: Any, tmp_path: Path) -> None:
    script = (
        f"{VERL} data.val_files=test.parquet actor_rollout_ref.rollout.n=4 algorithm.adv_estimator=grpo {overrides}"
    )
    assert value(converted(tmp_path, "run.sh", script), path) == expected


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.model.lora_adapter_path=a", "merge it into the model"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.x=1", "generation.vllm.extraArgs"),
        ("actor_rollout_ref.model.override_config.attn_dropout=0.1", "config.json"),
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.01",
            "the routers of experts",
        ),
        ("critic.ppo_epochs=3", "the critic has the policy's passes"),
        ("data.reward_fn_key=source", "name it so"),
        ("trainer.no_such_field=1", "has no such field"),
        ("actor_rollout_ref.actor.no_such_field=1", "has no such field"),
    ],
)
def test_what_a_job_does_not_have_is_left_and_nothing_by_its_section(
    override: str, reason: str, tmp_path: Path
) -> None:
    reasons = left(converted(tmp_path, "run.sh", f"{VERL} {override} actor_rollout_ref.rollout.n=4"))
    assert reason in reasons[override.lstrip("+").partition("=")[0]]


def test_an_over_long_punishment_is_a_term_at_each_of_its_names(tmp_path: Path) -> None:
    for place in ("reward_model.overlong_buffer", "reward_model.reward_kwargs.overlong_buffer_cfg"):
        script = f"{VERL} reward_model.reward_manager=dapo {place}.{{enable=True,len=128,penalty_factor=0.5}}"
        conversion = converted(tmp_path, "run.sh", script)
        assert value(conversion, "rewards")[-1] == {"name": "length", "length": {"bufferTokens": 128}, "weight": 0.5}
    naive = f"{VERL} reward_model.overlong_buffer.{{enable=True,len=128}}"
    reasons = left(converted(tmp_path, "run.sh", naive))
    assert any("with the reward manager dapo only" in reason for reason in reasons.values())
