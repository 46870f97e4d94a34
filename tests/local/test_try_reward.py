"""`rlhfless try-reward`: rewards tried on given or sampled responses, by the real workers, without training."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rlhfless_operator import cli
from rlhfless_operator.job.reading.validation import InvalidJobError
from rlhfless_operator.local.try_reward import TrialError, read_responses
from tests.figures import ROOT
from tests.training.whole_jobs import MakeJob, run_job

pytestmark = pytest.mark.usefixtures("warm_start")

TERMS = [
    {"name": "digits", "python": {"file": "reward.py"}},
    {"name": "ends", "weight": 0.5, "format": {"pattern": ".*7"}},
]


def try_reward(file: Path, *options: str) -> Result:
    return CliRunner().invoke(cli.app, ["try-reward", str(file), *options])


def tried(file: Path, *options: str) -> dict[str, Any]:
    result = try_reward(file, "--json", *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def written(folder: Path, *lines: dict[str, Any]) -> str:
    file = folder / "responses.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


def test_given_responses_are_scored_by_every_term(tiny_job: MakeJob, tmp_path: Path) -> None:
    responses = written(
        tmp_path,
        {"response": "1237", "row": 5},  # 1+2=, whose ground truth is 1
        {"response": "xx7", "prompt": "1+2="},
        {"response": "x"},  # the next prompt of the data: the first
        {"response": "99", "prompt": "9+9=", "ground_truth": 9},
    )
    found = tried(tiny_job(rewards=TERMS), "--responses", responses)
    assert [(each["row"], each["prompt"], each["terms"], each["reward"]) for each in found["responses"]] == [
        (5, "1+2=", {"digits": 1.25, "ends": 1.0}, 1.75),
        (5, "1+2=", {"digits": pytest.approx(1 / 3), "ends": 1.0}, pytest.approx(1 / 3 + 0.5)),
        (0, "0+0=", {"digits": 0.0, "ends": 0.0}, 0.0),
        (None, "9+9=", {"digits": 2.0, "ends": 0.0}, 2.0),
    ]
    # A group is a call, as in training.
    assert [(each["name"], each["calls"], each["error"]) for each in found["rewards"]] == [
        ("digits", 3, None),
        ("ends", 3, None),
    ]


@pytest.mark.slow
def test_sampled_responses_are_those_of_the_first_step(tiny_job: MakeJob, tmp_path: Path) -> None:
    settings = {"data": {"source": "train.jsonl", "shuffle": False}, "rewards": TERMS}
    file = tiny_job(steps=1, **settings)
    found = tried(file, "--prompts", "1", "--samples", "4")
    run_job(file)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "tiny" / "samples.jsonl").read_text().splitlines()]
    names = ("row", "prompt", "response", "tokens", "finish_reason", "terms", "reward")
    assert [{name: each[name] for name in names} for each in found["responses"]] == [
        {name: line[name] for name in names} for line in lines
    ]
    # What training kept can be scored again, by a reward that was changed.
    kept = str(tmp_path / "runs" / "tiny" / "samples.jsonl")
    assert [each["reward"] for each in tried(file, "--responses", kept)["responses"]] == [
        line["reward"] for line in lines
    ]


@pytest.mark.nightly
def test_a_failure_is_told_with_its_first_cause_beside_what_the_others_scored(
    tiny_job: MakeJob, tmp_path: Path
) -> None:
    file = tiny_job(rewards=TERMS)
    (file.parent / "reward.py").write_text(
        "def reward(completions, **columns):\n    return [float(completion) for completion in completions]\n"
    )
    responses = written(
        tmp_path, {"response": "1", "row": 0}, {"response": "two", "row": 4}, {"response": "3", "row": 5}
    )
    result = try_reward(file, "--responses", responses)
    assert result.exit_code == 1
    assert "reward 'digits' raised ValueError: could not convert string to float: 'two'" in result.stderr
    assert "row 4 of the prompts" in result.stderr
    table = [line.split() for line in result.stdout.splitlines()]
    assert ["0", "1", "2", "1", "0", "1"] in table
    assert ["4", "two", "4", "none", "0", "none"] in table
    assert any(line[:5] == ["ends", "format", "0.5", "3", "of"] for line in table)


@pytest.mark.nightly
def test_a_reward_that_scores_nothing_fails(tiny_job: MakeJob, tmp_path: Path) -> None:
    file = tiny_job()
    (file.parent / "reward.py").write_text("def reward(completions, **columns): return [None for _ in completions]\n")
    result = try_reward(file, "--responses", written(tmp_path, {"response": "1"}))
    assert result.exit_code == 1
    assert "no response has a reward" in result.stderr


@pytest.mark.nightly
def test_the_evaluations_own_rewards_can_be_tried(tiny_job: MakeJob, tmp_path: Path) -> None:
    own = {"data": {"source": "train.jsonl"}, "rewards": TERMS[1:], "sampling": {"temperature": 0}}
    file = tiny_job(evaluation=own)
    found = tried(file, "--evaluation", "--prompts", "1", "--samples", "2")
    assert [each["name"] for each in found["rewards"]] == ["ends"]
    first, second = (each["response"] for each in found["responses"])
    assert first == second
    result = try_reward(tiny_job("other"), "--evaluation")
    assert result.exit_code == 1
    assert "the job has no spec.evaluation" in str(result.exception)


@pytest.mark.slow
def test_a_row_that_the_data_does_not_have_is_named(tiny_job: MakeJob, tmp_path: Path) -> None:
    responses = written(tmp_path, {"response": "1"}, {"response": "1", "row": 12})
    result = try_reward(tiny_job(), "--responses", responses)
    assert result.exit_code == 1
    assert f"{responses}, line 2: the data has rows 0 to 11, not 12" in str(result.exception)


@pytest.mark.parametrize("options", [[], ["--evaluation"]])
def test_the_score_of_an_environment_is_refused(options: list[str]) -> None:
    result = try_reward(ROOT / "examples" / "tools" / "grpo.yaml", *options)
    assert result.exit_code == 1
    assert isinstance(result.exception, TrialError)
    assert "reward 'solved' is the score of the job's environment" in str(result.exception)
    assert "use rlhfless try-environment, or remove it from a copy of the job" in str(result.exception)


def test_data_that_cannot_be_read_is_named(tiny_job: MakeJob) -> None:
    file = tiny_job()
    (file.parent / "train.jsonl").write_text("{oops\n")
    with pytest.raises(InvalidJobError, match=r"line 1 of .*train\.jsonl is not JSON"):
        raise try_reward(file).exception or AssertionError


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.jsonl", '{"response": "1"}\n{"respons": "1"}\n', r"line 2 has no response; write \{\"response\""),
        ("r.jsonl", "{oops\n", "line 1 is not JSON .* or name the file .txt"),
        ("r.jsonl", '{"response": "1", "row": -1}\n', "line 1: row: .*greater than or equal to 0"),
        ("r.jsonl", "\n", "is empty; write one response per line"),
    ],
)
def test_a_file_that_holds_no_responses_is_refused_with_its_line(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(TrialError, match=message):
        read_responses(file, None)
    with pytest.raises(TrialError, match="can't be read"):
        read_responses(tmp_path / "nowhere.jsonl", None)


def test_each_line_of_text_is_a_response(tmp_path: Path) -> None:
    file = tmp_path / "responses.txt"
    file.write_text("one\n\n{three\n")
    assert [(each.response, each.row) for each in read_responses(file, 7)] == [("one", 7), ("", 7), ("{three", 7)]
