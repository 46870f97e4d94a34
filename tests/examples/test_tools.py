"""The example with tools: its environment, data and checkpoint."""

import importlib
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rlhfless_functions.environments.bridge import Bridge, Call
from rlhfless_functions.environments.tool_calls import CallParser
from tests.command_line import run_to_its_end
from tests.training.whole_jobs import assert_same_final_weights

TOOLS = Path(__file__).parents[2] / "examples" / "tools"

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(TOOLS))
    counter = importlib.import_module("counter")


def rows(name: str) -> list[dict[str, Any]]:
    """The rows of a file."""
    return [json.loads(line) for line in (TOOLS / name).read_text().splitlines()]


def test_the_right_calls_solve_a_question_and_no_others_do() -> None:
    environment = counter.Counter()
    assert environment.reset(start=50, ground_truth=48, prompt=[]) == "=50"
    assert environment.get_reward() == 0.0
    assert environment.add(3) == "53"
    assert environment.take(5) == "48"
    assert environment.get_reward() == 1.0


def test_no_held_out_question_is_trained_on() -> None:
    train, heldout = ({row["prompt"][0]["content"] for row in rows(f"{name}.jsonl")} for name in ("train", "heldout"))
    assert len(train) == 256 and len(heldout) == 200 and not train & heldout


@given(st.integers(0, 255), st.integers(0, 2**32))
def test_an_episode_of_right_calls_fits_into_the_response(row: int, seed: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOOLS / "model")
    question = rows("train.jsonl")[row]
    bridge = Bridge(tokenizer, (), {}, [tokenizer.eos_token_id])
    changes = question["prompt"][0]["content"].replace(".", "")
    calls = [Call("add" if part[0] == "+" else "take", {"amount": int(part[1])}) for part in _parts(changes)]
    parser = CallParser(tokenizer, (), "")
    length = len(bridge.opening(f"={question['start']}"))
    for call in calls:
        written = bridge.render_call(call)
        assert parser.calls(written) == [call]
        length += 1 + len(tokenizer.encode(written, add_special_tokens=False)) + 1
        length += len(bridge.after_calls(tokenizer.eos_token_id, [call], [str(random.Random(seed).randint(0, 999))]))
    assert length + 8 <= 224


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_two_steps_of_the_example_give_the_same_weights_with_one_and_four_actors(
    tmp_path: Path, algorithm: str
) -> None:
    jobs = []
    for actors in (1, 4):
        folder = tmp_path / str(actors)
        shutil.copytree(TOOLS, folder)
        job = yaml.safe_load((TOOLS / f"{algorithm}.yaml").read_text())
        job["metadata"]["name"] = f"actors-{actors}"
        spec = job["spec"]
        spec |= {"steps": 2, "planning": {"policy": "even"}, "artifacts": {"uri": str(tmp_path / "runs")}}
        spec["generation"]["instances"] = {"min": actors, "max": actors}
        if algorithm == "ppo":
            spec["algorithm"]["critic"]["warmupSteps"] = 0
        del spec["evaluation"]
        jobs.append(folder / "job.yaml")
        jobs[-1].write_text(yaml.safe_dump(job))
        run_to_its_end(jobs[-1], seconds=400)
    assert_same_final_weights(*jobs)


def _parts(changes: str) -> list[str]:
    return [changes[place + 1 : place + 3] for place in range(0, len(changes), 3)]
