"""An asynchronous job that was begun by a release whose groups kept to their step, and goes on with this one."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhfless_operator.training.asynchronous.rollouts_ahead import RolloutsAhead
from tests.training.asynchronous.test_loop import AHEAD, entries, replayed
from tests.training.whole_jobs import MakeJob, folder_of, half_written, records_of, run_job
from tests.training.whole_jobs import run_until_a_step_cannot_be_written as run_until

OLD_BEGUN = {"step", "policy"}
OLD_GROUP = {"prompt", "version"}
OLD_BATCH = {"step", "parts", "samples", "pieces"}


def write_as_that_release_did(folder: Path) -> None:
    """Leave the fields of the journal that it had, and add the critic of PPO jobs that it named."""
    for path in sorted((folder / "journal").glob("*.json")):
        content = json.loads(path.read_text())
        if path.name.endswith("-begun.json"):
            content = {**{name: content[name] for name in OLD_BEGUN}, "critic": None}
        else:
            content["groups"] = [{name: group[name] for name in OLD_GROUP} for group in content["groups"]]
            content["batch"] = {name: content["batch"][name] for name in OLD_BATCH}
        path.write_text(json.dumps(content))
    for path in (folder / "batches").rglob("*.json"):
        content = json.loads(path.read_text())
        assert not any(group.pop("metrics") for group in content["groups"])
        path.write_text(json.dumps(content))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("new_weights", ["finish", "switch"])
def test_the_new_driver_learns_from_each_group_once(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, new_weights: str
) -> None:
    """The earlier driver dies with step 1 done, step 2 learnt, rollout 3 complete, and some of rollout 4 prepared."""
    file = tiny_job("old", **{**AHEAD, "async": {"maxStaleness": 2, "newWeights": new_weights}}, steps=6)
    folder = folder_of(file)
    begin = RolloutsAhead.__init__

    def keeps_groups_to_their_step(ahead: RolloutsAhead, *arguments: Any) -> None:
        begin(ahead, *arguments)
        ahead.groups = None

    with monkeypatch.context() as earlier:
        earlier.setattr(RolloutsAhead, "__init__", keeps_groups_to_their_step)
        run_until(file, earlier, 2, lambda: any((folder / "batches" / "step-000004").glob("chunk-*.json")))
    write_as_that_release_did(folder)
    begun, taken = entries(file, "begun"), entries(file, "taken")
    assert [entry["step"] for entry in begun][:4] == [1, 2, 3, 4]
    assert "groups" not in json.loads((folder / "progress" / "step-000001.json").read_text())

    assert run_job(file)["phase"] == "Succeeded"
    assert entries(file, "begun")[: len(begun)] == begun
    assert entries(file, "taken")[: len(taken)] == taken
    names = [
        (group.get("rollout") or entry["step"], group["prompt"])
        for entry in entries(file, "taken")
        for group in entry["groups"]
    ]
    assert len(set(names)) == len(names) == 24
    for rollouts in (1, 2, 3), (4, 5, 6):
        prompts = [prompt for rollout, prompt in names if rollout in rollouts]
        assert sorted(prompts) == list(range(12)), "each prompt once an epoch"
    stale = [entry["base"] - group["version"] for entry in entries(file, "taken") for group in entry["groups"]]
    assert 0 <= min(stale) <= max(stale) <= 2
    records = [record for record in records_of(file) if record["step"]]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert all(0 <= record["metrics"]["reward"] <= 1 for record in records)
    assert half_written(folder) == []
    assert "6 steps taken again: the same weights bit for bit" in replayed(file)
