"""The export of a run that was stopped: the weights of its last finished step, and a run that can go on after it."""

import asyncio
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from rlhfless_operator.local.export import export_locally
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.journal.begun_job import write_begun_job
from tests.command_line import call
from tests.jobs import job
from tests.training.whole_jobs import (
    MakeJob,
    assert_same_final_weights,
    folder_of,
    run_job,
    run_until_a_step_cannot_be_written,
)


def begun(folder: Path, **status: object) -> str:
    """A run's folder with a document and a status."""
    root = str(folder / "runs" / "mine")
    write_begun_job(job(), JobFolder(root))
    content = RLHFJobStatus(uid="uid", steps=5, **status).model_dump(mode="json", by_alias=True)
    artifacts.write_json(JobFolder(root).file("status.json"), content)
    return root


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    result = call("export", str(tmp_path), str(tmp_path / "model"))
    assert result.returncode == 1
    assert f"{tmp_path} is no run's folder; name one, such as runs/quickstart" in result.stderr


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ({}, "has no finished step, so there are no weights to export"),
        ({"weights": {"version": 0, "uri": "/models/base"}}, "has no finished step"),
        ({"step": 2, "weights": {"version": 2, "uri": "/gone/step-2"}}, "weights of step 2 are not at /gone/step-2$"),
        (
            {"step": 2, "weights": {"version": 2, "uri": "runs/x"}},
            "runs/x; export from the folder in which the run was",
        ),
        ({"step": 2, "weights": {"version": 2, "uri": "/models/base", "adapter": "/gone"}}, "are not at /gone$"),
    ],
    ids=["nothing", "the model as given", "removed", "relative", "adapter"],
)
def test_where_nothing_is_published_that_is_said(tmp_path: Path, status: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        asyncio.run(export_locally(begun(tmp_path, **status), str(tmp_path / "model")))
    assert not (tmp_path / "model").exists()


def test_a_folder_with_files_is_not_touched(tmp_path: Path) -> None:
    weights, mine = tmp_path / "weights", tmp_path / "model"
    for folder, name in ((weights, "manifest.json"), (mine, "mine.txt")):
        folder.mkdir()
        (folder / name).write_text("{}")
    root = begun(tmp_path, step=2, weights={"version": 2, "uri": str(weights)})
    with pytest.raises(UserError, match=r"model has files already: name a folder that is empty"):
        asyncio.run(export_locally(root, str(mine)))
    assert [file.name for file in mine.iterdir()] == ["mine.txt"]


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")
@pytest.mark.parametrize(
    "lora",
    [None, pytest.param({"rank": 2}, marks=pytest.mark.nightly), {"rank": 2, "export": "adapter"}],
    ids=["full", "merged", "adapter"],
)
def test_a_run_that_died_has_the_model_of_its_last_step(
    tiny_job: MakeJob, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, object] | None
) -> None:
    """Its model answers as transformers loads it, and the run goes on to the weights of one that was never exported."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = {"source": str(tiny_model), **({"lora": lora} if lora else {})}
    file = tiny_job("mine", steps=3, model=model)
    run_until_a_step_cannot_be_written(file, monkeypatch, 3, once=lambda: True)
    before = sorted(str(path) for path in folder_of(file).rglob("*"))
    exported = tmp_path / "exported"
    result = call("export", str(folder_of(file)), str(exported))
    assert (result.returncode, result.stdout.strip()) == (0, f"step 2 of 3: model in {exported}"), result.stderr
    assert sorted(str(path) for path in folder_of(file).rglob("*")) == before
    assert (
        "| Steps | 2 of 3: the weights are those of a run that has not ended |" in (exported / "README.md").read_text()
    )

    is_adapter = bool(lora and lora.get("export"))
    policy = (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(exported)
    AutoTokenizer.from_pretrained(exported)
    if lora is None:
        weights = artifacts.local_folder(JobFolder(str(folder_of(file))).weights(2))
        trained = AutoModelForCausalLM.from_pretrained(weights)
        assert all(torch.equal(mine, its) for mine, its in zip(policy.parameters(), trained.parameters(), strict=True))
    if lora == {"rank": 2}:
        assert call("sample", str(exported), "1+1=", "--max-tokens", "4").returncode == 0
    if lora is None:
        run_job(file)
        whole = tiny_job("whole", steps=3, model=model)
        run_job(whole)
        assert_same_final_weights(file, whole)
