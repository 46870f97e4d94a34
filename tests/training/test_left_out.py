"""What a job leaves out of its data is said: on the console, in the summary, the status and the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.training.requests.tasks import StageFailedError
from tests.training.whole_jobs import MakeJob, folder_of, run_job, status_of

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

SHORT: dict[str, Any] = {"batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4}, "steps": 1}


def add_rows(file: Path, *prompts: str) -> None:
    """Append rows to a job's 12."""
    with (file.parent / "train.jsonl").open("a") as data:
        data.writelines(json.dumps({"prompt": prompt, "ground_truth": 1}) + "\n" for prompt in prompts)


def test_what_is_left_out_is_said_wherever_a_user_looks(tiny_job: MakeJob, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_job(**SHORT, evaluation={"data": {"source": "train.jsonl"}})
    add_rows(file, "1+" * 20, "", "1+" * 30)
    summary = run_job(file)
    said = capsys.readouterr().err
    why = "2 longer than sampling.maxPromptTokens (first line 13), 1 empty (first line 14)"
    assert f"data: 12 prompts of 15 rows; 3 were left out: {why}" in said
    assert f"evaluation.data: 12 prompts of 15 rows; 3 were left out: {why}" in said
    counts = {"rows": 15, "prompts": 12, "left_out": {"too_long": 2, "empty": 1}, "without_ground_truth": 0}
    assert summary["data"] == {"training": counts, "evaluation": counts}
    status = status_of(file)
    assert status["data"] == status["evaluationData"]
    assert status["data"] == {
        "rows": 15, "prompts": 12, "tooLong": 2, "empty": 1, "answered": 0, "withoutGroundTruth": 0,
    }  # fmt: skip
    report = (folder_of(file) / "report.html").read_text()
    assert "dropped: longer than sampling.maxPromptTokens" in report
    assert "assistant" not in report.partition("<h2>Data")[2].partition("</section>")[0], "there was none of these"


def test_too_much_left_out_fails_before_anything_is_generated_and_the_mended_job_goes_on(tiny_job: MakeJob) -> None:
    file = tiny_job(**SHORT)
    add_rows(file, *["1+" * 20] * 14)
    with pytest.raises(
        StageFailedError, match=r"14 of the 26 rows of .*, more than the share limits\.droppedPrompts \(0\.5\)"
    ):
        run_job(file)
    assert not (folder_of(file) / "rollouts").exists()
    file = tiny_job(**SHORT, limits={"droppedPrompts": 0.6})
    add_rows(file, *["1+" * 20] * 14)
    assert run_job(file)["data"]["training"]["left_out"] == {"too_long": 14}


def test_too_few_prompts_are_read_again_once_the_file_is_mended(tiny_job: MakeJob) -> None:
    file = tiny_job(**{**SHORT, "batch": {"promptsPerStep": 13, "samplesPerPrompt": 2, "minibatchSamples": 26}})
    add_rows(file, "1+" * 20)
    few = r"12 usable prompts, fewer than batch\.promptsPerStep, 13 \(1 rows were left out: 1 longer than"
    with pytest.raises(ValueError, match=few):
        run_job(file)
    add_rows(file, "1+1=")
    assert run_job(file)["steps"] == 1
