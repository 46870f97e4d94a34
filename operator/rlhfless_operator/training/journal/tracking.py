"""Metrics to TensorBoard, Weights & Biases and MLflow, besides `metrics.jsonl`, which stays their one source.

A tracker is told of a step after its commit, from a thread of its own: it can neither delay training nor end it. It is
told of the steps that it has missed, because it failed or the driver was killed, when the job is next opened. A tracker
holds each step once, however often a job is interrupted.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import yaml

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError
from rlhfless_operator.job.outputs import MlflowSpec, WandbSpec
from rlhfless_operator.job.reading.trackers import missing_trackers
from rlhfless_operator.job.redaction import redacted
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.records.record import KEPT_STATES, StepRecord
from rlhfless_operator.records.status import Phase


class TrackingError(UserError):
    """A tracker that the job asks for is not available."""


class Tracker(Protocol):
    """A destination of metrics."""

    newest: int
    """Last step that it holds from earlier drivers; -1 if none."""

    def log(self, step: int, scalars: dict[str, float], at: float) -> None:
        """Take a step's numbers; `at` is the Unix time at which the step was finished."""

    def close(self, phase: Phase) -> None:
        """Close it: this driver has no more steps."""


def check_tracking(job: RLHFJob, root: str) -> None:
    """Check, before anything is changed, that the trackers can work.

    Args:
        job: the job.
        root: URI of its folder.

    Raises:
        TrackingError: a package is not installed, or event files have no folder to go to.
    """
    tracking = job.spec.tracking
    faults = [
        f"spec.tracking.{name}: the package {name} is not installed; pip install {name}, or remove the field"
        for name in missing_trackers(tracking)
    ]
    if tracking.tensorboard and artifacts.local_path(root) is None:
        faults.append(
            f"spec.tracking.tensorboard: event files grow, which objects in a store such as {root} can't;"
            " take a local folder as artifacts.uri, or remove the field"
        )
    if faults:
        raise TrackingError("; ".join(faults))


class Tracking:
    """The trackers of a run.

    Args:
        trackers: by the name of their field.
        records: the steps that are committed already.
        note: called once for each tracker that has failed.
    """

    def __init__(
        self,
        trackers: dict[str, Tracker],
        records: Sequence[StepRecord] = (),
        note: Callable[[str], None] = lambda note: None,
    ) -> None:
        self._trackers = trackers
        self._note = note
        self._cost = Decimal(0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tracking")
        for record in records:
            self.log(record)

    def log(self, record: StepRecord) -> None:
        """Hand a committed step on. Returns at once."""
        if self._trackers:
            self._cost += record.cost
            at = time.time() if record.finished_at is None else record.finished_at
            self._thread.submit(self._log, record.step, scalars(record, self._cost), at)

    def close(self, phase: Phase) -> None:
        """Wait until everything is handed on, and close the trackers."""
        self._thread.submit(self._each, lambda tracker: tracker.close(phase))
        self._thread.shutdown(wait=True)

    def _log(self, step: int, numbers: dict[str, float], at: float) -> None:
        def log(tracker: Tracker) -> None:
            if step > tracker.newest:
                tracker.log(step, numbers, at)

        self._each(log)

    def _each(self, tell: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tell(tracker)
            except Exception as error:
                # The failure of an external service or package must not stop training.
                del self._trackers[name]
                self._note(
                    f"spec.tracking.{name}: {_sentence(error)}; training goes on without it, and the next"
                    " rlhfless run of this job hands on what is missing"
                )


def _sentence(error: Exception) -> str:
    """Return another package's error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")


def open_tracking(
    job: RLHFJob, root: str, uid: str, driver: int, records: Sequence[StepRecord], note: Callable[[str], None]
) -> Tracking:
    """Open the trackers that a job asks for, with its document, and hand on the steps that they lack.

    Args:
        job: the job.
        root: URI of its folder.
        uid: of this incarnation of the job; trackers continue the run of the same uid.
        driver: number of the driver.
        records: the committed steps.
        note: called with failures during the run.

    Raises:
        TrackingError: one can't be opened.
    """
    tracking, folder = job.spec.tracking, artifacts.local_path(root)
    document = redacted(job.model_dump(mode="json", by_alias=True, exclude_none=True))
    openers: dict[str, Callable[[], Tracker]] = {}
    if tracking.tensorboard and folder is not None:
        openers["tensorboard"] = lambda: TensorBoardTracker(folder / "tensorboard", driver, document)
    if (wandb := tracking.wandb) is not None:
        openers["wandb"] = lambda: WandbTracker(wandb, job.metadata.name, uid, folder, document)
    if (mlflow := tracking.mlflow) is not None:
        openers["mlflow"] = lambda: MlflowTracker(mlflow, job.metadata.name, uid, document)
    trackers: dict[str, Tracker] = {}
    for name, open_tracker in openers.items():
        try:
            trackers[name] = open_tracker()
        except Exception as error:
            Tracking(trackers).close("Failed")
            raise TrackingError(
                f"spec.tracking.{name}: {_sentence(error)}; check its settings and service, or remove the field"
            ) from error
    return Tracking(trackers, records, note)


def scalars(record: StepRecord, total_cost: Decimal) -> dict[str, float]:
    """Return a step's numbers by name. Trackers group them by the word before the first slash.

    `train/` and `eval/` are as in Hugging Face's Trainer, `timing_s/` as in verl; `instance_s/` and `cost/` are from
    the ledger.

    Args:
        record: the step.
        total_cost: money up to this step, it included.
    """
    numbers: dict[str, float] = {"timing_s/step": record.seconds}
    numbers |= {f"timing_s/{stage}": seconds for stage, seconds in record.stages.items()}
    for name, value in record.metrics.items():
        if name.startswith("seconds/"):
            numbers[f"timing_s/{name.removeprefix('seconds/')}"] = value
        elif name != "seconds":
            numbers[f"train/{name}"] = value
    numbers |= {f"eval/{name}": value for name, value in (record.evaluation or {}).items()}
    for stage, account in record.ledger.items():
        numbers |= {f"instance_s/{stage}/{state}": getattr(account, state) for state in KEPT_STATES}
        numbers[f"cost/{stage}"] = float(account.cost)
    return numbers | {"cost/step": float(record.cost), "cost/total": float(total_cost)}


class TensorBoardTracker:
    """One event file, rewritten by every driver, with the same numbers as `metrics.jsonl`.

    Its records and framing are TensorBoard's own. Its `EventFileWriter` is not used: it imports TensorFlow if that is
    installed, and a failure of its own thread, such as a full disk, would go unnoticed.

    Args:
        folder: receives the file.
        driver: number of the driver. A later file has a later name, so an open TensorBoard moves on to it.
        document: the job, shown under the Text tab.
    """

    newest = -1

    def __init__(self, folder: Path, driver: int, document: dict[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        folder.mkdir(parents=True, exist_ok=True)
        for earlier in folder.glob("events.out.tfevents.*.rlhfless"):
            earlier.unlink()
        self._writer = RecordWriter((folder / f"events.out.tfevents.{driver:010d}.rlhfless").open("wb"))
        now = time.time()
        self._write(self._event(wall_time=now, file_version="brain.Event:2"))
        # An open TensorBoard drops what it has read of earlier files from this step on.
        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._write(self._event(wall_time=now, step=0, session_log=restart))
        text = f"```yaml\n{yaml.safe_dump(document, sort_keys=False)}```"
        value = self._summary.Value(
            tag="job",
            metadata=summary_pb2.SummaryMetadata(
                plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"),
                data_class=summary_pb2.DATA_CLASS_TENSOR,
            ),
            tensor=tensor_pb2.TensorProto(
                dtype=types_pb2.DT_STRING,
                string_val=[text.encode()],
                tensor_shape=tensor_shape_pb2.TensorShapeProto(
                    dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)],
                ),
            ),
        )
        self._write(self._event(wall_time=now, step=0, summary=self._summary(value=[value])))

    def log(self, step: int, scalars: dict[str, float], at: float) -> None:
        """Write an event."""
        values = [self._summary.Value(tag=name, simple_value=number) for name, number in scalars.items()]
        self._write(self._event(wall_time=at, step=step, summary=self._summary(value=values)))

    def close(self, phase: Phase) -> None:
        """Close the file."""
        self._writer.close()

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class WandbTracker:
    """A Weights & Biases run whose id is the job's uid.

    Online, the service knows the last step. Offline, every driver writes the run anew from its first step and removes
    the folder of an earlier driver, because `wandb sync` should send each step once.

    Args:
        spec: project and mode.
        name: of the run.
        uid: its id.
        folder: the job's local folder for the run's files; the working directory if the job's is not local.
        document: the job.
    """

    def __init__(self, spec: WandbSpec, name: str, uid: str, folder: Path | None, document: dict[str, Any]) -> None:
        import wandb

        online = spec.mode == "online"
        if online and not wandb.login(prompt=False):
            raise ValueError("nobody is logged in: run wandb login, set WANDB_API_KEY, or set mode to offline")
        earlier = [] if online or folder is None else list((folder / "wandb").glob(f"offline-run-*-{uid}"))
        self._run = wandb.init(
            project=spec.project,
            id=uid,
            name=name,
            dir=folder,
            config=document,
            mode=spec.mode,
            resume="allow" if online else None,
            # The terminal belongs to the run's own view.
            settings=wandb.Settings(silent=True, console="off"),
        )
        self.newest = self._run.step - 1 if self._run.resumed else -1
        for path in earlier:
            if path.name not in self._run.dir:
                artifacts.remove(str(path))

    def log(self, step: int, scalars: dict[str, float], at: float) -> None:
        """Log a step."""
        self._run.log({**scalars, "_timestamp": at}, step=step)

    def close(self, phase: Phase) -> None:
        """Finish the run. One that did not succeed counts as failed, and may be resumed."""
        self._run.finish(exit_code=0 if phase == "Succeeded" else 1)


class MlflowTracker:
    """An MLflow run, found again by a tag with the job's uid; another tag, set with the metrics, has the last step.

    Args:
        spec: server or folder, and experiment.
        name: of the run.
        uid: the job's.
        document: the job; its leaves become parameters.
    """

    _MOST_PARAMS = 100
    """Most parameters that MLflow takes in a batch."""
    _LONGEST_PARAM = 6000
    """Most characters that MLflow takes in a parameter."""
    _OUTCOMES = {"Succeeded": "FINISHED", "Failed": "FAILED", "Interrupted": "KILLED", "Suspended": "KILLED"}  # noqa: RUF012

    def __init__(self, spec: MlflowSpec, name: str, uid: str, document: dict[str, Any]) -> None:
        from mlflow import MlflowClient, entities

        self._entities = entities
        self._client = MlflowClient(tracking_uri=spec.tracking_uri)
        experiment = self._client.get_experiment_by_name(spec.experiment)
        number = experiment.experiment_id if experiment else self._client.create_experiment(spec.experiment)
        found = self._client.search_runs([number], f"tags.`rlhfless.uid` = '{uid}'")
        if found:
            run = found[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            run = self._client.create_run(number, tags={"rlhfless.uid": uid}, run_name=name)
        self._run: str = run.info.run_id
        self.newest = int(run.data.tags.get("rlhfless.step", -1))
        if not found:
            params = [entities.Param(key, str(leaf)[: self._LONGEST_PARAM]) for key, leaf in _leaves(document)]
            for begin in range(0, len(params), self._MOST_PARAMS):
                self._client.log_batch(self._run, params=params[begin : begin + self._MOST_PARAMS])

    def log(self, step: int, scalars: dict[str, float], at: float) -> None:
        """Log a step in one batch."""
        metrics = [
            self._entities.Metric(_mlflow_name(name), number, round(at * 1000), step)
            for name, number in scalars.items()
        ]
        tag = self._entities.RunTag("rlhfless.step", str(step))
        self._client.log_batch(self._run, metrics=metrics, tags=[tag])

    def close(self, phase: Phase) -> None:
        """Record how the run ended; nothing if another driver has taken it over."""
        if phase in self._OUTCOMES:
            self._client.set_terminated(self._run, status=self._OUTCOMES[phase])


def _mlflow_name(name: str) -> str:
    """Return a name with at most one slash: where MLflow keeps files, `a/b` and `a/b/c` would be a file and a folder of
    one name."""
    group, _, rest = name.partition("/")
    return f"{group}/{rest.replace('/', '.')}"


def _leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else None
    if items is None:
        yield path, content
        return
    for key, inner in items:
        yield from _leaves(inner, f"{path}.{key}" if path else str(key))
