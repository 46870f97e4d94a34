"""A run, read from its folder for the report and the comparison."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import yaml

from rlhfless_functions import artifacts
from rlhfless_operator.job.reading.elsewhere import MOST_BYTES, excess_of
from rlhfless_operator.job.redaction import redacted
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.input_digests import InputChange, read_changes
from rlhfless_operator.records.record import SampleRecord, SpanRecord, StepRecord, read_records
from rlhfless_operator.records.settings_history import SettingsHistory, read_settings_history

_CURRENCY = re.compile("[A-Z]{3}")
_NO_CURRENCY = "?"


@dataclass(frozen=True)
class Run:
    """Everything that a run writes for people. Parts that an unfinished run has not written are empty."""

    job_text: str
    """The job document as YAML, as strangers may see it."""
    job: Mapping[str, Any]
    """The parsed job document."""
    status: Mapping[str, Any]
    """`status.json`."""
    summary: Mapping[str, Any]
    """`summary.json`."""
    records: Sequence[StepRecord]
    """The steps, from step 0 if there was an evaluation before the first."""
    spans: Sequence[SpanRecord]
    """States of the instances."""
    samples: Sequence[SampleRecord]
    """Responses of the evaluations and of training."""
    settings: SettingsHistory = field(default_factory=SettingsHistory)
    """Settings of the steps."""
    inputs: Sequence[InputChange] = ()
    """Files that changed during the run."""

    @property
    def name(self) -> str:
        """Name of the job."""
        metadata = self.job.get("metadata") or {}
        return str(self.summary.get("name") or metadata.get("name") or "run")

    @property
    def spec(self) -> Mapping[str, Any]:
        """The job's `spec`."""
        return self.job.get("spec") or {}

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""
        return str((self.spec.get("algorithm") or {}).get("name") or self.summary.get("algorithm") or "grpo")

    @property
    def currency(self) -> str:
        """Currency of all money."""
        given = str(self.summary.get("currency") or (self.spec.get("prices") or {}).get("currency") or "USD")
        return given if _CURRENCY.fullmatch(given) else _NO_CURRENCY

    @property
    def trained(self) -> Sequence[StepRecord]:
        """The training steps, without step 0."""
        return [record for record in self.records if record.step > 0]

    @property
    def cost(self) -> Decimal:
        """Price of the run so far."""
        given = self.summary.get("cost")
        return Decimal(str(given)) if given is not None else sum((record.cost for record in self.records), Decimal(0))

    @property
    def forecast(self) -> Decimal | None:
        """Forecast price of the whole job, if its other steps cost as much as the last ones."""
        given = self.summary.get("forecast_cost")
        return None if given is None else Decimal(str(given))

    @property
    def budget_used(self) -> float | None:
        """Share of the budget that is spent; None without a budget."""
        given = self.summary.get("budget_used")
        return None if given is None else float(given)

    @property
    def seconds(self) -> float:
        """Duration of training so far."""
        given = self.summary.get("seconds")
        return float(given) if given is not None else sum(record.seconds for record in self.records)

    @property
    def instance_seconds(self) -> float:
        """Instance-seconds so far."""
        given = self.summary.get("instance_seconds")
        if given is not None:
            return float(given)
        return sum(account.seconds for record in self.records for account in record.ledger.values())

    @property
    def held_out_rewards(self) -> Sequence[tuple[int, float]]:
        """(step, mean reward) of every evaluation."""
        return [(each.step, each.held_out_reward) for each in self.records if each.held_out_reward is not None]


def read_run(folder: str) -> Run:
    """Read a run's folder.

    Args:
        folder: path or fsspec URI of the job's folder.

    Raises:
        ValueError: if no run is there, or a file in it is damaged; the message says which.
    """
    job_uri = artifacts.join(folder, "job.yaml")
    if not artifacts.exists(job_uri):
        raise ValueError(f"{folder} is not a run: it has no job.yaml; name the folder of a job, such as runs/my-job")
    try:
        job = yaml.safe_load(artifacts.read_bytes(job_uri, most=MOST_BYTES))
        if (excess := excess_of(job)) is not None:
            raise ValueError(excess)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{job_uri} is damaged: {error}") from error
    job = redacted(job) if isinstance(job, dict) else {}
    return Run(
        job_text=yaml.safe_dump(job, sort_keys=False, allow_unicode=True),
        job=job if isinstance(job, dict) else {},
        status=_read_object(artifacts.join(folder, "status.json")),
        summary=_read_object(artifacts.join(folder, "summary.json")),
        records=_newest(read_records(artifacts.join(folder, "metrics.jsonl"), StepRecord)),
        spans=read_records(artifacts.join(folder, "ledger.jsonl"), SpanRecord),
        samples=read_records(artifacts.join(folder, "samples.jsonl"), SampleRecord),
        settings=read_settings_history(JobFolder(folder)),
        inputs=read_changes(JobFolder(folder)),
    )


def _newest(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Return one record for each step, in order. If a restarted driver finished a step again, its last record
    counts."""
    by_step = {record.step: record for record in records}
    return [by_step[step] for step in sorted(by_step)]


def _read_object(uri: str) -> Mapping[str, Any]:
    if not artifacts.exists(uri):
        return {}
    try:
        value = artifacts.parse_sealed(artifacts.read_bytes(uri))
    except ValueError as error:
        raise ValueError(f"{uri} is damaged: {error}; restore it or delete it") from error
    return value if isinstance(value, dict) else {}
