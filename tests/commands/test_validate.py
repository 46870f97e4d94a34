"""`rlhfless validate`: several documents, JSON, and the data as training reads it."""

import json
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhfless_functions.api import DataCounts
from rlhfless_functions.api.data_check import DataCheck, DataCheckResult, ShownPrompt
from rlhfless_operator import cli
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.local import data_check, functions_process
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.requests.builder import RequestBuilder
from tests import jobs
from tests.command_line import run_command
from tests.data.reading import write_jsonl

pytestmark = pytest.mark.usefixtures("warm_start")

MakeJob = Callable[..., Path]

EXAMPLES = [
    path for name in ("quickstart", "tools") for path in (Path(__file__).parents[2] / "examples" / name).glob("*.yaml")
]
"""Jobs whose bits are compared."""

TEMPLATE = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}\n{% endfor %}a:"
FUNCTIONS = """
def turned(row):
    print("turning", row["q"])
    return {"prompt": row["q"] + "=", "ground_truth": row["a"].split("# ")[1]}

def short(row, number):
    return len(row["prompt"]) < 6
"""


def validate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["validate", *map(str, arguments)])


@pytest.fixture
def mixed_job(tiny_job: MakeJob) -> Path:
    """A job with two sources: one of chat messages, and one of an odd form, with functions for its rows."""
    folder = tiny_job().parent
    (folder / "rows.py").write_text(FUNCTIONS)
    chats = [{"messages": [{"role": "user", "content": f"{n}+0="}], "answer": str(n)} for n in range(8)]
    write_jsonl(folder / "chats.jsonl", [*chats, {"messages": [], "answer": "1"}])
    odd = [{"q": f"1+{n}", "a": f"so # {n + 1}"} for n in range(5)]
    write_jsonl(folder / "odd.jsonl", [odd[0], {"q": "1+1+1+1", "a": "so # 4"}, *odd[1:]])
    functions = {name: {"file": "rows.py", "function": name} for name in ("turned", "short")}
    sources = [
        {"source": "chats.jsonl", "groundTruthColumn": "answer", "systemPrompt": "add"},
        {"source": "odd.jsonl", "map": functions["turned"], "filter": functions["short"], "weight": 0.5},
    ]
    return tiny_job(
        data={"source": None, "sources": sources},
        model={"chatTemplate": TEMPLATE},
        rewards=[{"name": "ends", "format": {"pattern": ".*7"}}, {"name": "right", "math": {}}],
        steps=1,
    )


def test_data_of_several_sources_is_shown_as_the_model_sees_it(mixed_job: Path) -> None:
    result = validate("--data", "--prompts", "1", "--json", mixed_job)
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)
    assert (found["valid"], found["faults"], found["not_checked"]) == (True, [], [])
    (data,) = found["data"]
    assert (data["field"], data["faults"]) == ("spec.data", [])
    assert [(each["row"], each["text"], each["is_chat"], each["ground_truth"]) for each in data["prompts"]] == [
        (0, "s:add\nu:0+0=\na:", True, "0"),
        (8, "1+0=", False, "1"),
    ]
    counts = data["counts"]
    assert (counts["rows"], counts["empty"], counts["filtered"], counts["sizes"]) == (14, 1, 1, [8, 5])
    assert any("data.filter left out 1 of 6 rows" in note for note in counts["notes"])


@pytest.mark.slow
def test_the_same_data_trains(mixed_job: Path, tmp_path: Path) -> None:
    ended = subprocess.run(run_command(mixed_job), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "samples.jsonl").read_text().splitlines()]
    assert {line["prompt"] for line in lines} <= {f"s:add\nu:{n}+0=\na:" for n in range(8)} | {
        f"1+{n}=" for n in range(5)
    }


def test_faults_of_the_data_are_named_beside_its_prompts(
    tiny_job: MakeJob, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = tiny_job()
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "9", "answer": "the \x1b[31m 3 +"}]
    write_jsonl(tmp_path / "tiny" / "train.jsonl", rows)
    (tmp_path / "tiny" / "rows.py").write_text("def shown(row):\n    print('turning', row['prompt'])\n    return row\n")
    settings = ("spec.data.map={file: rows.py, function: shown}", "spec.rewards.0={name: m, math: {}}")
    result = validate("--data", good, *(f"--set={setting}" for setting in settings))
    assert result.exit_code == 2
    assert "is a valid job" not in result.stdout
    source = tmp_path / "tiny" / "train.jsonl"
    assert f'  row 0, {source} (plain text, 4 tokens, ground truth "2"):\n    | 1+1=\n' in result.stdout
    assert f"{good}: spec.data: {source} has 1 ground truths in column 'answer'" in result.stderr
    assert "line 2: " in result.stderr
    assert "\x1b" not in result.output
    # A function of the user's says what it wants to.
    assert "turning 1+1=" in capfd.readouterr().err


def test_without_the_functions_data_is_not_read_and_the_remedy_is_said(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        functions_process.importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name)
    )
    file = tiny_job()
    assert validate(file).exit_code == 0
    result = validate("--data", file)
    assert result.exit_code == 1
    assert str(result.exception) == (
        "--data reads prompts as training does, but the functions are not installed; in the clone of rlhfless,"
        " pip install '.[functions]'"
    )


def test_a_number_of_prompts_needs_data(tiny_job: MakeJob) -> None:
    result = validate("--prompts", "3", tiny_job())
    assert result.exit_code == 1
    assert "--prompts works only with --data; give both" in result.stderr


def test_several_documents_are_checked_and_one_fault_is_enough_to_fail(tiny_job: MakeJob) -> None:
    good, wrong = tiny_job("good"), tiny_job("wrong", step=3)
    result = validate(good, wrong, good.parent / "missing.yaml")
    assert result.exit_code == 2
    assert result.stdout == f"{good}: good is a valid job\n"
    assert f"{wrong}:" in result.stderr and "spec.step: unknown field" in result.stderr
    assert "missing.yaml:1: the file cannot be read" in result.stderr
    assert validate(good, good).exit_code == 0


def test_it_says_which_options_make_two_runs_differ(tiny_job: MakeJob) -> None:
    one_update = {"batch": {"minibatchSamples": None}, "planning": {"policy": "cost"}}
    overlapped = tiny_job("overlapped", **one_update)
    assert "  depends on timing: spec.learning.overlap: auto — the last bits" in validate(overlapped).stdout
    ahead = json.loads(validate("--json", tiny_job("ahead", **{"async": {}})).stdout)
    assert [line.split(" — ")[0] for line in ahead[0]["timing"]] == ["spec.async"]
    never = tiny_job("never", **one_update, learning={"overlap": "never"})
    assert "depends on timing" not in validate(never, tiny_job("several-updates"), *EXAMPLES).stdout


def test_json_has_an_object_for_each_document(tiny_job: MakeJob) -> None:
    good, wrong = tiny_job("good", generation={"drafting": "auto"}), tiny_job("wrong", step=3)
    result = validate("--json", good, wrong)
    assert (result.exit_code, result.stderr) == (2, "")
    first, second = json.loads(result.stdout)
    assert first == {
        "file": str(good),
        "valid": True,
        "name": "good",
        "faults": [],
        "not_checked": [],
        "experimental": ["spec.generation.drafting: auto"],
        "timing": [],
    }
    assert (second["file"], second["valid"]) == (str(wrong), False)
    (fault,) = second["faults"]
    assert (fault["field"], fault["message"], fault["remedy"]) == (
        "spec.step",
        "unknown field",
        "did you mean steps?",
    )
    assert wrong.read_text().splitlines()[fault["line"] - 1].strip() == "step: 3"


def test_the_questions_are_the_requests_of_training() -> None:
    """Otherwise `--data` would accept data that training refuses."""
    own = {"data": {"source": "held.jsonl"}, "rewards": [{"name": "e", "exactMatch": {}}]}
    job = jobs.job(model={"source": "m"}, evaluation=own, limits={"droppedPrompts": 0.25})
    builder = RequestBuilder(job, JobFolder("runs/job"), "uid")
    asked = data_check.questions(job, prompts=3)
    assert list(asked) == ["training", "evaluation"]
    for purpose, question in asked.items():
        request = builder.materialize(purpose, 0)
        for field in DataCheck.model_fields.keys() - {"prompts"}:
            assert getattr(question, field) == getattr(request, field), field


def test_a_rehearsal_has_no_data_to_read() -> None:
    job = jobs.job(rehearsal={"trace": "trace.parquet", "gpu": "H100"})
    assert data_check.questions(job, 1) == {} and data_check.check_data(job, 1) == []


def test_fewer_prompts_than_a_step_needs_are_a_fault(tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_job(tiny_job(batch={"promptsPerStep": 8}))
    counts = DataCounts(rows=9, empty=2, first={"empty": "line 3"})
    answer = DataCheckResult(counts=counts).model_dump_json().encode()
    monkeypatch.setattr(data_check, "ask_functions", lambda *_: answer)
    (found,) = data_check.check_data(job, 1)
    assert found.result.faults == [
        "the data has 7 usable prompts, fewer than batch.promptsPerStep, 8 (2 rows were left out: 2 empty (first"
        " line 3)); add prompts, or lower batch.promptsPerStep"
    ]


def test_a_long_prompt_is_shown_by_both_ends() -> None:
    shown: dict[str, Any] = {"source": "s", "row": 0, "tokens": 9, "is_chat": True}
    prompt = ShownPrompt(text="begin" + "x" * 5000 + "\x1b" + "end", **shown)
    lines = list(data_check.describe(data_check.CheckedData(field="f", result=DataCheckResult(prompts=[prompt]))))
    assert lines[0] == "  row 0, s (chat, 9 tokens):"
    assert lines[1].startswith("    | beginxxx") and lines[-1].endswith("xxx\\x1bend")
    assert lines[2] == "    | [… 3009 characters left out …]"
