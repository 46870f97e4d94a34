"""Files that change in the middle of a job: those of training are refused, the others are taken and recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.training.driver import JobChangedError
from tests.training.whole_jobs import MakeJob, folder_of, records_of, run_job

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

HALF = "def reward(completions, **columns):\n    return [0.5 for _ in completions]\n"


def lengthened(file: Path, make: MakeJob, **spec: Any) -> Path:
    """The same job with one step more, written without its files."""
    texts = {each: each.read_bytes() for each in file.parent.iterdir() if each.is_file() and each.suffix != ".yaml"}
    longer = make(steps=2, **spec)
    for path, content in texts.items():
        path.write_bytes(content)
    return longer


@pytest.mark.slow
def test_training_data_that_changed_is_refused_with_its_name(tiny_job: MakeJob) -> None:
    file = tiny_job(steps=1)
    run_job(file)
    (data,) = file.parent.glob("*.jsonl")
    data.write_text(data.read_text().replace('"ground_truth": 0', '"ground_truth": 7', 1))
    with pytest.raises(JobChangedError, match=rf"content of {data} \(spec.data.source\) changed since") as raised:
        run_job(lengthened(file, tiny_job))
    assert "undo the change" in str(raised.value)


@pytest.mark.slow
def test_changed_code_of_rewards_and_evaluation_data_is_taken_from_the_next_step_on(tiny_job: MakeJob) -> None:
    held_out = {"prompt": "1+1=", "ground_truth": 1}
    file = tiny_job(steps=1)
    (file.parent / "held.jsonl").write_text(json.dumps(held_out) + "\n")
    evaluation = {"evaluation": {"data": {"source": "held.jsonl"}}}
    file = lengthened(file, lambda **given: tiny_job(**{**given, "steps": 1}), **evaluation)
    run_job(file)
    (file.parent / "reward.py").write_text(HALF)
    (file.parent / "held.jsonl").write_text((json.dumps(held_out) + "\n") * 2)
    run_job(lengthened(file, tiny_job, **evaluation))
    first, last = (record["metrics"]["reward/digits"] for record in records_of(file) if record["step"] > 0)
    assert last == 0.5 != first
    assert len(json.loads((folder_of(file) / "data" / "evaluation" / "index.json").read_text())["lengths"]) == 2
    (change,) = map(json.loads, (folder_of(file) / "inputs.jsonl").read_text().splitlines())
    assert change["from_step"] == 2
    assert [text.rpartition("(")[2] for text in change["inputs"]] == [
        "spec.rewards[0].python.file)",
        "spec.evaluation.data.source)",
    ]
    assert "Settings and files that changed during the run" in (folder_of(file) / "report.html").read_text()


@pytest.mark.slow
def test_data_that_is_mended_before_a_step_is_done_is_read_again(tiny_job: MakeJob) -> None:
    from tests.training.whole_jobs import status_of

    file = tiny_job(steps=1)
    (file.parent / "reward.py").write_text("def reward(completions, **columns):\n    raise ValueError('x')\n")
    with pytest.raises(Exception, match="ValueError"):
        run_job(file)
    assert status_of(file)["step"] == 0
    (data,) = file.parent.glob("*.jsonl")
    data.write_text(data.read_text() * 2)
    (file.parent / "reward.py").write_text(HALF)
    run_job(file)
    assert len(json.loads((folder_of(file) / "data" / "training" / "index.json").read_text())["lengths"]) == 24
