"""Trackers: TensorBoard for real, Weights & Biases and MLflow against stand-ins.

wandb and mlflow are not among the development dependencies. Their tests put a tiny fake package of that name on
`sys.path`, which records the calls it gets in a file: what is checked is what is sent and when, not that the real
packages take it.
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from rlhfless_functions import artifacts
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.record import StageAccount, StepRecord
from rlhfless_operator.training.journal.tracking import (
    Tracking,
    TrackingError,
    check_tracking,
    open_tracking,
    scalars,
)
from tests import jobs
from tests.training.whole_jobs import folder_of, run_job

if TYPE_CHECKING:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MakeJob = Callable[..., Path]


def record(step: int, reward: float = 0.5) -> StepRecord:
    return StepRecord(
        step=step,
        seconds=2.0,
        stages={"generation": 1.25, "learning": 0.75},
        metrics={"reward": reward, "kl/reference": 0.01, "seconds": 0.75, "seconds/publish": 0.25},
        ledger={"generation": StageAccount(busy=1.5, idle=0.5, cost=Decimal("0.25"))},
        evaluation={"reward": 0.75} if step == 0 else None,
        finished_at=1000.0 + step,
    )


def job_with(tracking: dict[str, Any], uri: str = "runs") -> RLHFJob:
    return jobs.job("tracked", steps=3, artifacts={"uri": uri}, tracking=tracking)


def test_names_are_the_usual_ones() -> None:
    assert scalars(record(0), Decimal("1.50")) == {
        "train/reward": 0.5,
        "train/kl/reference": 0.01,
        "eval/reward": 0.75,
        "timing_s/step": 2.0,
        "timing_s/generation": 1.25,
        "timing_s/learning": 0.75,
        "timing_s/publish": 0.25,
        "instance_s/generation/starting": 0.0,
        "instance_s/generation/busy": 1.5,
        "instance_s/generation/idle": 0.5,
        "instance_s/generation/switching": 0.0,
        "instance_s/generation/draining": 0.0,
        "instance_s/generation/asleep": 0.0,
        "cost/generation": 0.25,
        "cost/step": 0.25,
        "cost/total": 1.5,
    }


# --- what is asked for and can't be had ---


@pytest.mark.parametrize(
    ("name", "tracking"),
    [
        ("tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb": {"project": "p", "mode": "offline"}}),
        ("mlflow", {"mlflow": {"trackingUri": "sqlite:///mlflow.db", "experiment": "e"}}),
    ],
)
def test_a_tracker_that_is_not_installed_is_one_error_before_anything_is_touched(
    tiny_job: MakeJob, monkeypatch: pytest.MonkeyPatch, name: str, tracking: dict[str, Any]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda asked: None if asked == name else found(asked))
    file = tiny_job(tracking=tracking)
    with pytest.raises(TrackingError) as error:
        run_job(file)
    assert str(error.value) == (
        f"spec.tracking.{name}: the package {name} is not installed; pip install {name}, or remove the field"
    )
    assert not folder_of(file).parent.exists()


def test_a_folder_of_logs_is_not_taken_for_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mlflow").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(TrackingError, match="mlflow is not installed"):
        check_tracking(job_with({"mlflow": {"trackingUri": "x", "experiment": "e"}}), "runs/tracked")


def test_event_files_need_a_local_folder() -> None:
    check_tracking(job_with({"tensorboard": True}), "runs/tracked")
    with pytest.raises(TrackingError, match=r"spec\.tracking\.tensorboard: .* take a local folder as artifacts\.uri"):
        check_tracking(job_with({"tensorboard": True}), "s3://bucket/tracked")


# --- TensorBoard ---


def read_events(folder: Path) -> "EventAccumulator":
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def steps_in(folder: Path, tag: str) -> list[int]:
    """The steps of a tag in all event files, as they are written."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event

    steps = []
    for file in sorted(folder.glob("*tfevents*")):
        for raw in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(raw)
            steps += [event.step for value in event.summary.value if value.tag == tag]
    return steps


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_a_run_can_be_looked_at_in_tensorboard_and_goes_on_there(tiny_job: MakeJob) -> None:
    settings = {"tracking": {"tensorboard": True}, "evaluation": {"data": {"source": "train.jsonl"}}}
    for steps in (1, 2):
        file = tiny_job(steps=steps, **settings)
        run_job(file)
    root = folder_of(file)

    events = read_events(root / "tensorboard")
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    rewards = events.Scalars("train/reward")
    assert [event.step for event in rewards] == [1, 2]
    assert [event.value for event in rewards] == pytest.approx([line["metrics"]["reward"] for line in records[1:]])
    assert [event.wall_time for event in rewards] == pytest.approx([line["finished_at"] for line in records[1:]])
    assert [event.step for event in events.Scalars("eval/reward")] == [0, 1, 2]
    assert {"timing_s/step", "timing_s/learning", "instance_s/generation/busy", "cost/total"} <= set(
        events.Tags()["scalars"]
    )
    assert steps_in(root / "tensorboard", "timing_s/step") == [0, 1, 2], "none twice, though two drivers wrote"
    [text] = events.Tensors("job")
    shown = text.tensor_proto.string_val[0].decode()
    assert yaml.safe_load(shown.removeprefix("```yaml").removesuffix("```"))["spec"]["steps"] == 2


def test_a_driver_that_was_killed_leaves_no_step_doubled_or_missing(tmp_path: Path) -> None:
    job = job_with({"tensorboard": True}, str(tmp_path))
    root = str(tmp_path / "tracked")
    notes: list[str] = []
    first = open_tracking(job, root, "uid", 1, [], notes.append)
    for step in (0, 1):
        first.log(record(step))
    # Killed here: step 2 was committed and never handed on.
    second = open_tracking(job, root, "uid", 2, [record(0), record(1), record(2)], notes.append)
    second.log(record(3))
    second.close("Succeeded")
    first.close("Running")
    folder = tmp_path / "tracked" / "tensorboard"
    assert steps_in(folder, "train/reward") == [0, 1, 2, 3]
    assert [event.value for event in read_events(folder).Scalars("cost/total")] == [0.25, 0.5, 0.75, 1.0]
    assert notes == []


def test_event_files_are_written_without_torch_and_in_little_memory(tmp_path: Path) -> None:
    program = """
import resource, sys
import rlhfless_operator.local.local_run
from rlhfless_operator.training.journal.tracking import TensorBoardTracker
tracker = TensorBoardTracker(__import__("pathlib").Path(sys.argv[1]), 1, {"spec": {}})
tracker.log(1, {"train/reward": 1.0}, 0.0)
tracker.close("Succeeded")
print(sorted({"torch", "tensorflow", "pandas", "pyarrow"} & set(sys.modules)))
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
    output = subprocess.run([sys.executable, "-c", program, tmp_path], check=True, capture_output=True, text=True)
    modules, peak_kib = output.stdout.splitlines()
    assert modules == "[]"
    assert int(peak_kib) < 150 * 1024


def test_a_tracker_that_fails_does_not_end_training_and_says_so_once(tmp_path: Path) -> None:
    class Failing:
        newest = -1

        def log(self, step: int, scalars: dict[str, float], at: float) -> None:
            raise ConnectionError("no answer")

        def close(self, phase: str) -> None:
            raise AssertionError("it was given up")

    notes: list[str] = []
    tracking = Tracking({"mlflow": Failing()}, [], notes.append)
    tracking.log(record(1))
    tracking.log(record(2))
    tracking.close("Succeeded")
    assert len(notes) == 1
    assert notes[0].startswith("spec.tracking.mlflow: ConnectionError: no answer; training goes on without it")


# --- Weights & Biases and MLflow, against stand-ins ---

FAKE_WANDB = """
import json, os, pathlib

def login(prompt=True):
    return "WANDB_API_KEY" in os.environ

class Settings:
    def __init__(self, **settings):
        assert settings["silent"]

class Run:
    def __init__(self, options):
        self.calls = pathlib.Path(os.environ["FAKE_CALLS"])
        before = [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []
        logged = [call["step"] for call in before if call["call"] == "log"]
        self.resumed = options["mode"] == "online" and bool(logged)
        self.step = max(logged) + 1 if self.resumed else 0
        self.write(call="init", **options)
        place = pathlib.Path(options["dir"] or ".") / "wandb" / f"{options['mode']}-run-{len(before)}-{options['id']}"
        self.dir = str(place / "files")
        os.makedirs(self.dir)

    def write(self, **call):
        with self.calls.open("a") as file:
            file.write(json.dumps(call, default=str) + chr(10))

    def log(self, numbers, step):
        self.write(call="log", step=step, numbers=numbers)

    def finish(self, exit_code):
        self.write(call="finish", exit_code=exit_code)

def init(settings, **options):
    return Run(options)
"""

FAKE_MLFLOW = '''
import json, os, pathlib
from types import SimpleNamespace as Object

class entities:
    Metric = Param = RunTag = staticmethod(lambda *parts: list(parts))

class MlflowClient:
    """Keeps everything in one JSON file, named by the tracking URI."""
    def __init__(self, tracking_uri):
        self.file = pathlib.Path(tracking_uri)

    def read(self):
        return json.loads(self.file.read_text()) if self.file.exists() else {"experiments": [], "runs": []}

    def change(self, run_id, **changes):
        store = self.read()
        store["runs"][int(run_id)].update(changes)
        self.file.write_text(json.dumps(store))

    def get_experiment_by_name(self, name):
        names = self.read()["experiments"]
        return Object(experiment_id=str(names.index(name))) if name in names else None

    def create_experiment(self, name):
        store = self.read()
        store["experiments"].append(name)
        self.file.write_text(json.dumps(store))
        return str(len(store["experiments"]) - 1)

    def search_runs(self, experiments, filter_string):
        uid = filter_string.split("'")[1]
        return [
            Object(info=Object(run_id=str(number)), data=Object(tags=run["tags"]))
            for number, run in enumerate(self.read()["runs"]) if run["tags"]["rlhfless.uid"] == uid
        ]

    def create_run(self, experiment, tags, run_name):
        store = self.read()
        store["runs"].append({"name": run_name, "tags": tags, "params": [], "metrics": [], "status": "RUNNING"})
        self.file.write_text(json.dumps(store))
        return Object(info=Object(run_id=str(len(store["runs"]) - 1)), data=Object(tags=tags))

    def log_batch(self, run_id, metrics=(), params=(), tags=()):
        assert len(params) <= 100
        run = self.read()["runs"][int(run_id)]
        self.change(
            run_id, metrics=run["metrics"] + list(metrics), params=run["params"] + list(params),
            tags=run["tags"] | dict(tags),
        )

    def update_run(self, run_id, status):
        self.change(run_id, status=status)

    def set_terminated(self, run_id, status):
        self.change(run_id, status=status)
'''


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Fake wandb and mlflow packages; returns the file that wandb's calls go to."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "wandb.py").write_text(FAKE_WANDB)
    (packages / "mlflow.py").write_text(FAKE_MLFLOW)
    calls = tmp_path / "calls.jsonl"
    monkeypatch.setenv("FAKE_CALLS", str(calls))
    monkeypatch.syspath_prepend(packages)
    yield calls
    for name in ("wandb", "mlflow"):
        sys.modules.pop(name, None)


def track_twice(job: RLHFJob, root: str) -> None:
    """One driver that is stopped after two steps, and one that goes on; a step of the first was never handed on."""
    first = open_tracking(job, root, "uid-1", 1, [], print)
    first.log(record(0))
    first.log(record(1))
    first.close("Interrupted")
    second = open_tracking(job, root, "uid-1", 2, [record(0), record(1), record(2)], print)
    second.log(record(3))
    second.close("Succeeded")


def test_wandb_online_goes_on_where_its_service_is(stand_ins: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "key")
    job = job_with({"wandb": {"project": "words"}})
    track_twice(job, str(tmp_path / "run"))
    calls = [json.loads(line) for line in stand_ins.read_text().splitlines()]
    assert [call["call"] for call in calls] == ["init", "log", "log", "finish", "init", "log", "log", "finish"]
    init = calls[0]
    assert (init["project"], init["id"], init["name"], init["resume"]) == ("words", "uid-1", "tracked", "allow")
    assert init["config"]["spec"]["steps"] == 3
    logged = [call for call in calls if call["call"] == "log"]
    assert [call["step"] for call in logged] == [0, 1, 2, 3]
    assert logged[3]["numbers"]["train/reward"] == 0.5
    assert logged[3]["numbers"]["cost/total"] == 1.0
    assert [call["exit_code"] for call in calls if call["call"] == "finish"] == [1, 0]


def test_wandb_offline_leaves_one_folder_with_every_step(stand_ins: Path, tmp_path: Path) -> None:
    job = job_with({"wandb": {"project": "words", "mode": "offline"}})
    track_twice(job, str(tmp_path / "run"))
    calls = [json.loads(line) for line in stand_ins.read_text().splitlines()]
    assert [call["step"] for call in calls if call["call"] == "log"] == [0, 1, 0, 1, 2, 3]
    [folder] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    assert folder.name == "offline-run-4-uid-1", "the second driver's"


def test_wandb_online_without_a_key_is_an_error(
    stand_ins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(TrackingError, match=r"spec\.tracking\.wandb: .*run wandb login, .* or set mode to offline"):
        open_tracking(job_with({"wandb": {"project": "words"}}), str(tmp_path), "uid", 1, [], print)


def test_mlflow_goes_on_with_its_run(stand_ins: Path, tmp_path: Path) -> None:
    store = tmp_path / "mlflow.json"
    job = job_with({"mlflow": {"trackingUri": str(store), "experiment": "words"}})
    track_twice(job, str(tmp_path / "run"))
    content = artifacts.read_json(str(store))
    assert content["experiments"] == ["words"]
    [run] = content["runs"]
    assert (run["name"], run["status"]) == ("tracked", "FINISHED")
    assert [step for name, _, _, step in run["metrics"] if name == "train/reward"] == [0, 1, 2, 3]
    assert ["train/reward", 0.5, 1_003_000, 3] in run["metrics"]
    assert {"train/reward", "train/kl.reference"} <= {name for name, *_ in run["metrics"]}
    assert ["spec.rewards.0.name", "right"] in run["params"]
    assert len({name for name, _ in run["params"]}) == len(run["params"]), "a parameter can be set once"


def test_mlflow_that_cannot_be_opened_is_an_error(stand_ins: Path, tmp_path: Path) -> None:
    job = job_with({"mlflow": {"trackingUri": str(tmp_path), "experiment": "words"}})
    with pytest.raises(TrackingError, match=r"spec\.tracking\.mlflow: IsADirectoryError: .*check its settings"):
        open_tracking(job, str(tmp_path), "uid", 1, [], print)
