"""Train in environments of OpenEnv's repository, which are not made for rlhfless and not changed for it.

    git clone https://github.com/meta-pytorch/OpenEnv
    python -m venv openenv && openenv/bin/pip install openenv numpy textarena
    python benchmarks/environments/foreign_servers.py --environments OpenEnv/envs --python openenv/bin/python
        [--steps 10] [--artifacts DIR] [--json FILE]

Each job starts its environment's own server, with the command that its page names, and trains the model of
`examples/tools` for some steps. Three kinds of environment are among them: tools of MCP (echo), actions of one field on
a server of one session (maze), and a text game (Guess The Number of TextArena). The model was made for another task:
the figures say that episodes are played, scored and learnt from, not that they are won.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.shared.local_jobs import run_job
from benchmarks.shared.places import REPOSITORY
from benchmarks.shared.records import described_run, write_record

EXAMPLE = REPOSITORY / "examples" / "tools"
LONGEST = 8192
"""Tokens of a conversation: the example's tokenizer has one for a character, and games explain themselves at length."""
PROMPTS = ("abc", "12+3", "hello", "a+4b+5", "7", "xyz", "q1", "b2")
REWARDS = '''"""What the servers do not score."""


def answered(completions: list[list[dict]], **columns: object) -> list[float]:
    """Count the answers of tools and of the game."""
    return [float(sum(message["role"] != "assistant" for message in each)) for each in completions]


def digits(completions: list[list[dict]], **columns: object) -> list[float]:
    """Prefer digits to all that is said."""
    said = ["".join(message["content"] for message in each if message["role"] == "assistant") for each in completions]
    return [sum(map(str.isdigit, each)) / max(1, len(each)) for each in said]
'''


@dataclass(frozen=True)
class Foreign:
    """An environment of the repository."""

    name: str
    rewards: tuple[str, ...]
    """Rewards beside the environment's own."""
    prompt_tokens: int
    response_tokens: int
    variables: tuple[str, ...] = ()
    """Environment variables of its server."""
    sessions: int = 16
    """Sessions that its server allows."""


ENVIRONMENTS = (
    Foreign("echo_env", ("answered",), 256, 320),
    Foreign("maze_env", ("digits",), 256, 768, sessions=1),
    Foreign(
        "textarena_env",
        ("digits",),
        2048,
        2048,
        ("TEXTARENA_ENV_ID=GuessTheNumber-v0", "TEXTARENA_DOWNLOAD_NLTK=0"),
    ),
)


def run(folder: Path, foreign: Foreign, options: argparse.Namespace) -> dict[str, Any]:
    """Train in one environment, and return what its last step and all episodes had."""
    job = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    name = foreign.name.replace("_", "-")
    job["metadata"]["name"] = name
    spec = job["spec"]
    server = [options.python, "-m", "uvicorn", f"{foreign.name}.server.app:app"]
    variables = [f"PYTHONPATH={options.environments.resolve()}", *foreign.variables]
    spec["environment"] = {
        "openenv": {
            "command": ["env", *variables, *server, "--host", "$(HOST)", "--port", "$(PORT)"],
            "sessions": foreign.sessions,
        },
        "maxTurns": 4,
    }
    files = {"file": "rewards.py"}
    spec["rewards"] = [{"name": "environment", "environment": {}}] + [
        {"name": reward, "python": {**files, "function": reward}} for reward in foreign.rewards
    ]
    spec["sampling"] |= {"maxPromptTokens": foreign.prompt_tokens, "maxResponseTokens": foreign.response_tokens}
    spec["batch"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4, "minibatchSamples": 16}
    spec |= {"steps": options.steps, "artifacts": {"uri": str(folder / "runs")}}
    del spec["evaluation"]
    place = folder / f"{name}.yaml"
    place.write_text(yaml.safe_dump(job))
    steps = run_job(place, folder / "runs" / name)
    first, last = steps[0]["metrics"], steps[-1]["metrics"]
    rewards = ("environment", *foreign.rewards)
    return {
        "environment": foreign.name,
        "steps": len(steps),
        "turns": sum(step["metrics"]["environment/turns"] for step in steps) / len(steps),
        "rewards": {each: [first[f"reward/{each}"], last[f"reward/{each}"]] for each in rewards},
        "failed": sum(step["metrics"].get("environment/ended/failed", 0.0) for step in steps) / len(steps),
    }


def main() -> None:
    """Train in each, and print a row as it ends."""
    parser = argparse.ArgumentParser(description="Train in environments of OpenEnv's repository.")
    parser.add_argument("--environments", type=Path, required=True, help="folder envs of OpenEnv's repository")
    parser.add_argument("--python", required=True, help="Python that has openenv, numpy and textarena")
    parser.add_argument("--steps", type=int, default=10, help="steps of a job")
    parser.add_argument("--artifacts", type=Path, help="folder for the jobs; by default one that is removed")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = []
    print("| Environment | Steps | Turns | Rewards, first and last step | Failed |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as made:
        folder = options.artifacts or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copytree(EXAMPLE / "model", folder / "model", dirs_exist_ok=True)
        config = json.loads((folder / "model" / "config.json").read_text())
        (folder / "model" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONGEST}))
        (folder / "rewards.py").write_text(REWARDS)
        rows_of_data = ({"prompt": [{"role": "user", "content": text}]} for text in PROMPTS)
        (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows_of_data))
        for foreign in ENVIRONMENTS:
            row = run(folder, foreign, options)
            rewards = ", ".join(f"{name} {a:.2f} → {b:.2f}" for name, (a, b) in row["rewards"].items())
            print(
                f"| {foreign.name} | {row['steps']} | {row['turns']:.1f} | {rewards} | {row['failed']:.0%} |",
                flush=True,
            )
            rows.append(row)
    write_record({**described_run(("torch", "transformers")), "rows": rows}, options.json)


if __name__ == "__main__":
    main()
