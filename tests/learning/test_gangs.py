"""Several instances that learn together: they take the steps that one takes, and say why when they can't."""

import json
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from rlhfless_functions import artifacts
from rlhfless_functions.api import Gang, LearnRequest, Waiting, WeightsReference
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskContext, TaskError
from rlhfless_functions.settings import LoraSettings, OptimizerSettings
from tests.learning.jobs import PPO, Job, StoppedContext, context, job_of
from tests.learning.test_ranks import OPTIMIZER, make_job, with_processes

torch.set_num_threads(1)

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


def gang_of(folder: Path, size: int = 2, *, number: int = 0, within_seconds: float = 600) -> Gang:
    meeting = str(folder / f"meeting-{uuid.uuid4().hex}.json")
    return Gang(size=size, number=number, meeting=meeting, within_seconds=within_seconds)


def members(request: LearnRequest, gang: Gang) -> list[LearnRequest]:
    """What each instance is asked."""
    gangs = [gang.model_copy(update={"number": number}) for number in range(gang.size)]
    return [request.model_copy(update={"gang": each}) for each in gangs]


def run_instances(folder: Path, asked: list[list[LearnRequest]], *versions: str) -> list[list[dict[str, Any]]]:
    """Have instances, each a process of its own, take their requests; what each said."""
    running = []
    for number, requests in enumerate(asked):
        file = folder / f"requests-{number}"
        file.write_text("\n".join(request.model_dump_json() for request in requests))
        command = [sys.executable, "-m", "tests.learning.gang_member", str(file), *versions[number : number + 1]]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    said = [process.communicate()[0].splitlines() for process in running]
    return [[json.loads(line) for line in lines] for lines in said]


def tensors(uri: str) -> dict[str, torch.Tensor]:
    folder = artifacts.local_folder(uri)
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_close(uri: str, expected: str) -> None:
    found, wanted = tensors(uri), tensors(expected)
    assert found
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "processes"), [("ppo", 1), ("grpo, two minibatches", 2), ("an adapter", 1)])
def test_instances_take_the_steps_that_one_takes_whatever_their_number(
    kind: str, processes: int, tmp_path: Path, tiny_model: Path
) -> None:
    job = make_job(kind, tmp_path, tiny_model)
    alone = job.undisturbed(4)
    checkpoint = str(tmp_path / "checkpoint-of-both")
    given = with_processes(job, processes)
    later: dict[str, Any] = {"checkpoint": checkpoint, "checkpoint_step": 2, **given}
    first = members(job.request(1, "together", **given), gang_of(tmp_path))
    second = members(job.request(2, "together", save_checkpoint=checkpoint, **given), gang_of(tmp_path))
    third = job.request(3, "together", **{**later, "replay": []})
    fourth = members(job.request(4, "together", **{**later, "replay": [job.batch(3)]}), gang_of(tmp_path))
    # An instance has the same part of the weights as before, with every request.
    said = run_instances(tmp_path, [[first[0], second[1], third, fourth[0]], [first[1], second[0], fourth[1]]])
    assert [len(lines) for lines in said] == [4, 3]
    assert not [line for lines in said for line in lines if "metrics" not in line]
    assert said[0][1] == said[1][1]
    assert ["seconds/load" in line["metrics"] for line in said[0]] == [True, False, True, True]
    for step in (1, 2, 3, 4):
        assert_close(str(tmp_path / "together" / f"weights-{step}"), str(tmp_path / "undisturbed" / f"weights-{step}"))
        if kind == "ppo":
            critic = str(tmp_path / "together" / f"critic-{step}")
            assert_close(critic, str(tmp_path / "undisturbed" / f"critic-{step}"))
    for name, value in alone[1].metrics.items():
        if not name.startswith(("seconds", "weights/bytes", "tokens/shared")):
            assert said[0][1]["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name


def test_an_instance_ends_its_ranks_only_once_they_owe_the_others_nothing(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.learning.leaving_rank", str(tmp_path), str(store.port)]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(4)]
    said = [rank.communicate(timeout=300)[0].strip() for rank in ranks]
    everyone = "rank 0, rank 1, rank 2, rank 3"
    assert (said[0], *said[2:]) == (everyone,) * 3


@pytest.mark.slow
def test_instances_without_a_file_system_in_common_publish_together_what_changed_too(
    tmp_path: Path, tiny_model: Path, s3: str, artifact_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path, tiny_model, algorithm=PPO, optimizer=OPTIMIZER)
    job.undisturbed(2)
    given = {"learning": with_processes_alone(job)["learning"].model_copy(update={"weight_deltas": "auto"})}
    checkpoint = f"{s3}/checkpoint"
    to = {"publish": f"{s3}/weights", "publish_critic": f"{s3}/critic", "save_checkpoint": checkpoint}
    first = members(job.request(1, **given, **to), gang_of(tmp_path))
    to = {"publish": f"{s3}/weights-2", "publish_critic": f"{s3}/critic-2", "checkpoint": checkpoint, "replay": []}
    # A fresh pair of instances goes on from what this one has uploaded.
    base = WeightsReference(version=1, uri=f"{s3}/weights")
    second = members(job.request(2, checkpoint_step=1, base=base, **given, **to), gang_of(tmp_path))
    for requests in (first, second):
        said = run_instances(tmp_path, [[request] for request in requests])
        assert not [line for lines in said for line in lines if "metrics" not in line]
    for name, step in (("weights", 1), ("critic", 1), ("weights-2", 2), ("critic-2", 2)):
        kind = name.partition("-")[0]
        assert_close(f"{s3}/{name}", str(tmp_path / "undisturbed" / f"{kind}-{step}"))
    monkeypatch.setenv("RLHFLESS_CACHE", str(tmp_path / "copies-of-an-actor"))
    tensors(f"{s3}/weights")
    before = artifacts.fetched()
    assert_close(f"{s3}/weights-2", str(tmp_path / "undisturbed" / "weights-2"))
    # Each instance has published what changed in the half that it holds.
    assert artifacts.fetched().deltas - before.deltas == 2
    assert artifacts.fetched().refused_deltas == before.refused_deltas


def with_processes_alone(job: Job) -> dict[str, Any]:
    return {"learning": job.request(1).learning.model_copy(update={"processes": 1})}


def test_instances_of_different_versions_say_what_to_do(tmp_path: Path, tiny_model: Path) -> None:
    job = make_job("an adapter", tmp_path, tiny_model)
    requests = members(job.request(1), gang_of(tmp_path))
    said = run_instances(tmp_path, [[request] for request in requests], "1.0", "1.1")
    for lines in said:
        assert "number 1 has rlhfless 1.0, number 2 has 1.1; give all learning pods one image" in lines[0]["error"]
        assert (lines[0]["reason"], lines[0]["retryable"]) == ("bad_request", False)
    assert not (tmp_path / "undisturbed" / "weights-1").exists()


def test_instances_with_other_numbers_of_processes_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    job = make_job("an adapter", tmp_path, tiny_model)
    one, two = members(job.request(1), gang_of(tmp_path))
    two = two.model_copy(update=with_processes(job, 2))
    said = run_instances(tmp_path, [[one], [two]])
    assert all("number 1 has 1, number 2 has 2; set learning.processes" in lines[0]["error"] for lines in said)


def test_an_instance_whose_partner_does_not_come_waits_no_longer_than_it_may(tmp_path: Path, tiny_model: Path) -> None:
    job, learner, events = make_job("an adapter", tmp_path, tiny_model), Learner(), []
    for number, missing in (
        (0, r"number 2 did not join; a learning pod may lack room"),
        (1, r"has not published its address"),
    ):
        gang = gang_of(tmp_path, number=number, within_seconds=0.2)
        with pytest.raises(TaskError, match=rf"instance {number + 1} of 2 .* waited for 0.2 s: .*{missing}") as caught:
            learner.run(job.request(1, gang=gang), TaskContext(emit=events.append))
        assert caught.value.retryable
    assert [event.waiting for event in events if isinstance(event, Waiting)] == [True, False] * 2


def test_an_instance_that_cannot_reach_the_others_says_what_may_keep_it_from_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    gang = gang_of(tmp_path, number=1, within_seconds=0.2)
    artifacts.write_json(gang.meeting, {"host": "127.0.0.1", "port": 1})
    job = make_job("an adapter", tmp_path, tiny_model)
    with pytest.raises(TaskError, match=r"can't connect to the first one at 127\.0\.0\.1:1; .* NetworkPolicy"):
        Learner().run(job.request(1, gang=gang), context())


def test_an_instance_that_waits_for_the_others_can_be_cut(tmp_path: Path, tiny_model: Path) -> None:
    job = make_job("an adapter", tmp_path, tiny_model)
    with pytest.raises(TaskError, match="was interrupted by a drain while the instance waited for the others"):
        Learner().run(job.request(1, gang=gang_of(tmp_path)), StoppedContext(2))


def test_muon_is_refused_for_several_instances(tmp_path: Path, tiny_model: Path) -> None:
    job = job_of(tmp_path, tiny_model, lora=LoraSettings(rank=2), optimizer=OptimizerSettings(name="muon"))
    requests = members(job.request(1, **with_processes_alone(job)), gang_of(tmp_path))
    said = run_instances(tmp_path, [[request] for request in requests])
    assert all("set learning.processes to 1 and learning.instances.max to 1" in lines[0]["error"] for lines in said)
