"""Public datasets in their own form, on a hub of the tests' own, train without adaptation: a job names the dataset, and
of one with several configurations which one. The rows are ours."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run_to_its_end
from tests.data.hub_server import GSM8K_CARD, Files, Hub, parquet
from tests.data.hub_server import hub as hub  # A fixture.


def gsm8k() -> Files:
    """openai/gsm8k: two configurations; `answer` has the reasoning with calculations in <<…>>, then `#### `."""
    rows = [
        {
            "question": f"Ann sold {price},000 shells in May and half as many in June. How many did she sell?",
            "answer": f"In June Ann sold {price}000/2 = <<{price}000/2={price}00*5>>{price * 500} shells.\n"
            f"In all she sold {price}000+{price * 500} = <<{price}000+{price * 500}={price * 1500}>>{price * 1500}.\n"
            f"#### {price * 1500:,}",
        }
        for price in range(2, 10)
    ]
    names = [
        f"{subset}/{split}-00000-of-00001.parquet" for subset in ("main", "socratic") for split in ("train", "test")
    ]
    return {"README.md": GSM8K_CARD, **{name: parquet(rows) for name in names}}


def competition_math() -> Files:
    """hendrycks/competition_math: `problem`, `level`, `type`, and a `solution` whose answer is in a box."""
    rows = [
        {
            "problem": f"Compute $\\frac{{{number}}}{{{number}}} - \\left(\\frac{{1}}{{{number}}}\\right)$.",
            "level": f"Level {1 + number % 5}",
            "type": "Prealgebra",
            "solution": f"Since $\\frac{{{number}}}{{{number}}} = 1$, we have $1 - \\frac1{{{number}}} = "
            f"\\boxed{{\\frac{{{number - 1}}}{{{number}}}}}$.",
        }
        for number in range(2, 10)
    ]
    return {"data/train-00000-of-00001.parquet": parquet(rows), "data/test-00000-of-00001.parquet": parquet(rows[:2])}


def deepscaler() -> Files:
    """agentica-org/DeepScaleR-Preview-Dataset: one JSON list with `problem`, `answer` and a `solution`, often empty."""
    answers = ["-\\frac{2}{3}", "10", "6", "\\sqrt{5}", "(-1, 2)", "x^2+1", "3.5", "2\\pi"]
    rows = [
        {"problem": f"Let $x_{number} = {answer}$. What is $x_{number}$?", "answer": answer, "solution": ""}
        for number, answer in enumerate(answers)
    ]
    return {"deepscaler.json": json.dumps(rows, indent=2).encode()}


def kodcode() -> Files:
    """KodCode/KodCode-V1: `test` has pytest functions that import from `solution`; other columns are nested."""
    rows = [
        {
            "style": "instruct",
            "subset": "Prefill",
            "conversation_id": f"Prefill_{number}_I",
            "question": f"Write a function `add_{number}` that adds {number} to each number of a list.",
            "solution": f"def add_{number}(numbers):\n    return [each + {number} for each in numbers]",
            "test": f"from solution import add_{number}\n\n"
            f"def test_some():\n    assert add_{number}([1, 2]) == [{number + 1}, {number + 2}]\n\n"
            f"def test_none():\n    assert add_{number}([]) == []",
            "test_info": [
                {"docstring": "", "function_declaration": f"def add_{number}(numbers):",
                 "function_name": f"add_{number}", "parameter_list": "(numbers)"}
            ],
            "gpt_pass_sequence": [1, 0, 1],
            "gpt_pass_trial_num": 2,
            "gpt_difficulty": "easy",
            "gpt_pass_percentage": 0.667,
            "trials": {"trial_0": {"is_correct": True, "file_path": None}},
            "metadata": {"original_instruction": None, "seed_ids": f"[{number}]"},
        }
        for number in range(8)
    ]  # fmt: skip
    return {f"data/{split}-00000-of-00001.parquet": parquet(rows) for split in ("train", "incorrect")}


@dataclass(frozen=True)
class Form:
    """A dataset, what a job says about it, and responses to its first row that are right and wrong."""

    name: str
    files: Callable[[], Files]
    data: dict[str, Any]
    reward: dict[str, Any]
    right: str
    wrong: str


MATH: dict[str, Any] = {"math": {}}
ADDS = "```python\ndef add_0(numbers):\n    return {}\n```"
FORMS = [
    Form("openai/gsm8k", gsm8k, {"subset": "main"}, MATH, "So it is \\boxed{3000}.", "\\boxed{3}"),
    Form("hendrycks/competition_math", competition_math, {}, MATH, "\\boxed{0.5}", "\\boxed{2}"),
    Form("agentica-org/DeepScaleR-Preview-Dataset", deepscaler, {}, MATH, "\\boxed{-2/3}", "\\boxed{2/3}"),
    Form("KodCode/KodCode-V1", kodcode, {}, {"code": {}}, ADDS.format("list(numbers)"), ADDS.format("[1]")),
]  # fmt: skip


def scores(file: Path, responses: list[str]) -> list[float]:
    """The rewards of responses to the first row, as `try-reward` has them."""
    asked = file.parent / "responses.jsonl"
    asked.write_text("".join(json.dumps({"row": 0, "response": each}) + "\n" for each in responses))
    command = [sys.executable, "-m", "rlhfless_operator", "try-reward", str(file), "--responses", str(asked), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [each["reward"] for each in json.loads(done.stdout)["responses"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "form",
    [FORMS[0], *(pytest.param(form, marks=pytest.mark.nightly) for form in FORMS[1:])],
    ids=lambda form: form.name.partition("/")[2],
)
def test_a_public_form_trains_two_steps_from_the_hub(
    form: Form, hub: Hub, tiny_job: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(form.name, form.files())
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    file = tiny_job(
        "public",
        data={"source": f"hub:{form.name}", **form.data},
        rewards=[{"name": "right", **form.reward}],
        sampling={"maxPromptTokens": 200, "maxResponseTokens": 8},
        batch={"promptsPerStep": 4, "samplesPerPrompt": 2, "minibatchSamples": 8},
        algorithm={"name": "grpo", "kl": {"coefficient": 0.0}},
        generation={"instances": {"min": 1, "max": 1}},
        steps=2,
    )
    assert scores(file, [form.right, form.wrong]) == [1.0, 0.0]
    run_to_its_end(file)
    run = tmp_path / "runs" / "public"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(step["step"] for step in steps) == 2
    assert (run / "model" / "config.json").is_file()
