"""The operator's Prometheus metrics. A scrape reads the numbers from the runs; nothing polls.

Counters begin at 0 with the operator's process, as Prometheus expects. No metric has a label per step.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from rlhfless_functions.api import STAGES, Stage
from rlhfless_operator.controller.figures import RESPONSE_TOKENS, planned_money, response_tokens, training_figures
from rlhfless_operator.job.charged import Charged
from rlhfless_operator.planner.pools.placement import DISTANCES
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.records.record import CHARGED_STATES, StepRecord
from rlhfless_operator.records.status import Phase
from rlhfless_operator.training.journal.ledger import Ledger
from rlhfless_operator.training.journal.step_journal import StepJournal
from rlhfless_operator.training.run import TrainingRun

_JOB = ("namespace", "job")
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LONG = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Few buckets, because each is a series for every job and stage."""
_PHASES: tuple[Phase, ...] = get_args(Phase)


class OperatorMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._jobs: dict[tuple[str, str], JobMeter] = {}
        self._phases: dict[tuple[str, str], Phase] = {}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"rlhfless_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"rlhfless_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"rlhfless_{name}", text, labels, buckets=buckets, registry=self.registry)

        self.gpu_seconds = counter(
            "gpu_seconds_total", "GPU-seconds by the state of the instance.", *_JOB, "stage", "state"
        )
        self.cost = counter("cost_total", "What instances cost, in the job's currency.", *_JOB, "stage")
        self.steps = counter("steps_total", "Finished training steps.", *_JOB)
        self.job_steps = gauge("job_steps", "Training steps of the whole job.", *_JOB)
        self.stage_duration = histogram(
            "stage_duration_seconds", "Time in which only this stage delayed a step.", _LONG, *_JOB, "stage"
        )
        self.cold_start = histogram(
            "cold_start_seconds", "Time from requesting an instance until it is ready.", _LONG, *_JOB, "stage"
        )
        self.reassignments = counter(
            "reassignments_total", "Shares that moved to another instance: one was lost, or the driver moved them.",
            *_JOB, "reason",
        )  # fmt: skip
        self.weights_read = counter(
            "weights_read_bytes_total",
            "Bytes of new weights that generation instances read, by their distance to the learner.",
            *_JOB,
            "distance",
        )
        self.actors = gauge("generation_actors", "Generation instances: wanted by the plan, and ready.", *_JOB, "kind")
        self.asleep = gauge("instances_asleep", "Instances that are kept without a GPU.", *_JOB, "stage")
        self.under_way = gauge(
            "steps_under_way", "Steps in each stage; an asynchronous job has several.", *_JOB, "stage"
        )
        self.forecast = gauge("cost_forecast_total", "Forecast of the job's total cost.", *_JOB)
        self.budget = gauge("budget_used_ratio", "Share of the job's budget that is spent.", *_JOB)
        self.cost_plan = counter(
            "cost_plan_total", "Planned cost of generation: the chosen plan, the cheapest plan, and the lower bound.",
            *_JOB, "kind",
        )  # fmt: skip
        self.reward = gauge("reward", "Mean reward of the last step.", *_JOB)
        self.held_out_reward = gauge("evaluation_reward", "Mean reward of the last evaluation.", *_JOB)
        self.response_tokens = gauge("response_tokens", "Response tokens in the last step.", *_JOB, "statistic")
        self.training = gauge("training", "Metrics of the learner in the last step.", *_JOB, "metric")
        self.phase = gauge("job_phase", "1 for the job's current phase, 0 for the others.", *_JOB, "phase")
        self.last_progress = gauge(
            "job_last_progress_timestamp_seconds", "Unix time of the job's last progress.", *_JOB
        )
        self.status_writes = counter("operator_status_writes_total", "Requests that wrote a job's status.")
        self.api_requests = counter(
            "operator_api_requests_total", "The controller's requests for jobs, by verb.", "verb"
        )
        self.jobs = gauge("operator_jobs", "Jobs that the operator manages.")
        self.control = histogram(
            "control_seconds",
            "Time from the end of a stage until a running instance takes the first request of the next stage.",
            _SHORT,
        )

    def requested(self, verb: str) -> None:
        """Count a request of the controller to the API server."""
        self.api_requests.labels(verb).inc()
        if verb == "patch":
            self.status_writes.inc()

    def job(self, namespace: str, name: str) -> "JobMeter":
        """Return the meter of a job, for all of its drivers."""
        return self._jobs.setdefault((namespace, name), JobMeter(self, namespace, name))

    def show_phase(self, namespace: str, name: str, phase: Phase) -> None:
        """Show a job's phase."""
        if self._phases.get((namespace, name)) != phase:
            self._phases[namespace, name] = phase
            for other in _PHASES:
                self.phase.labels(namespace, name, other).set(float(other == phase))
        self.jobs.set(len(self._phases))

    def forget(self, namespace: str, name: str) -> None:
        """Remove the series of a deleted job."""
        self._jobs.pop((namespace, name), None)
        self._phases.pop((namespace, name), None)
        self.jobs.set(len(self._phases))
        for metric in self._of_jobs():
            metric.remove_by_labels({"namespace": namespace, "job": name})

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        now = time.monotonic()
        for meter in list(self._jobs.values()):
            meter.update(now)
        return generate_latest(self.registry)

    def _of_jobs(self) -> tuple[Counter | Gauge | Histogram, ...]:
        return (
            *(self.gpu_seconds, self.cost, self.steps, self.job_steps, self.stage_duration, self.cold_start),
            *(self.reassignments, self.weights_read, self.actors, self.asleep, self.forecast, self.budget),
            *(self.cost_plan, self.reward, self.held_out_reward, self.response_tokens, self.training, self.phase),
            *(self.last_progress, self.under_way),
        )


@dataclass
class JobMeter:
    """One job's numbers."""

    metrics: OperatorMetrics
    namespace: str
    job: str
    ledger: Ledger = field(default_factory=Ledger)
    """Every instance of the job since this operator began; never closed."""
    lengths: dict[int, list[int]] = field(default_factory=dict)
    """Response tokens of the samples so far, for each step that is not counted yet."""
    _driven: tuple[TrainingRun, StepJournal] | None = None
    _prices: Mapping[Charged, Decimal] = field(default_factory=lambda: dict.fromkeys(STAGES, Decimal(0)))
    _gpus: Mapping[Stage, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 1))
    _counted_step: int = 0
    _charged: dict[tuple[str, ...], float] = field(default_factory=lambda: defaultdict(float))

    def attach(self, run: TrainingRun, journal: StepJournal) -> None:
        """Count what a new driver of the job finishes."""
        self._driven, self._counted_step = (run, journal), journal.status.step
        self._prices, self._gpus = run.spec.instance_prices, run.spec.instance_gpus
        # Start at 0: Prometheus does not count the first value of a series as an increase.
        for stage in STAGES:
            self.metrics.stage_duration.labels(self.namespace, self.job, stage)
            self.metrics.cold_start.labels(self.namespace, self.job, stage)
        for far in DISTANCES:
            self.metrics.weights_read.labels(self.namespace, self.job, far)

    def detach(self) -> None:
        """Stop counting for a driver that has ended."""
        self.update(time.monotonic())
        self._driven = None
        self.metrics.actors.labels(self.namespace, self.job, "wanted").set(0)
        for stage in STAGES:
            self.metrics.under_way.labels(self.namespace, self.job, stage).set(0)

    def observe(self, change: StateChange) -> None:
        """Record an instance's change of state."""
        self.ledger.observe(change)
        for span in self.ledger.take_spans():
            if span.state == "starting":
                self.metrics.cold_start.labels(self.namespace, self.job, span.stage).observe(span.end - span.start)

    def moved(self) -> None:
        """Record progress of the job."""
        self.metrics.last_progress.labels(self.namespace, self.job).set(time.time())

    def update(self, now: float) -> None:
        """Update counters and gauges.

        Args:
            now: monotonic seconds.
        """
        metrics, labels = self.metrics, (self.namespace, self.job)
        # Terminating pods still cost money after their driver has ended.
        total = self.ledger.running(now)
        for stage in STAGES:
            for state in CHARGED_STATES:
                seconds = self._gpus[stage] * total.total(stage, state)
                self._count(metrics.gpu_seconds, (*labels, stage, state), seconds)
        for charged in self._prices:
            self._count(metrics.cost, (*labels, charged), float(total.cost(self._prices, charged)))
        instances = self.ledger.instances()
        ready = instances.get(("generation", "idle"), 0) + instances.get(("generation", "busy"), 0)
        metrics.actors.labels(*labels, "ready").set(ready)
        for stage in STAGES:
            metrics.asleep.labels(*labels, stage).set(instances.get((stage, "asleep"), 0))
        if self._driven is None:
            return
        run, journal = self._driven
        under_way = [stage for stage, _ in run.progress.stages]
        for stage in STAGES:
            metrics.under_way.labels(*labels, stage).set(under_way.count(stage))
        wanted = run.progress.actors if {"generation", "evaluation"} & {*under_way} else 0
        metrics.actors.labels(*labels, "wanted").set(wanted)
        if run.prompts.total_steps:
            metrics.job_steps.labels(*labels).set(run.prompts.total_steps)
        for record in journal.records:
            if record.step > self._counted_step:
                self._count_step(record)
        if journal.records:
            self._show(journal)

    def _count_step(self, record: StepRecord) -> None:
        metrics, labels = self.metrics, (self.namespace, self.job)
        self._counted_step = record.step
        metrics.steps.labels(*labels).inc()
        for stage, seconds in record.stages.items():
            if stage in STAGES:
                metrics.stage_duration.labels(*labels, stage).observe(seconds)
        for kind, money in planned_money(record, self._prices["generation"]).items():
            metrics.cost_plan.labels(*labels, kind).inc(money)
        for reason, name in (("lost", "generation/lost_instances"), ("cut", "generation/cuts")):
            metrics.reassignments.labels(*labels, reason).inc(record.metrics.get(name, 0.0))
        for far in DISTANCES:
            metrics.weights_read.labels(*labels, far).inc(record.metrics.get(f"weights/bytes_{far}", 0.0))
        # A driver that resumes with an earlier driver's batch has not seen its samples.
        if lengths := self.lengths.pop(record.step, []):
            for statistic, tokens in zip(RESPONSE_TOKENS, response_tokens(lengths), strict=True):
                metrics.response_tokens.labels(*labels, statistic).set(tokens)

    def _show(self, journal: StepJournal) -> None:
        metrics, labels = self.metrics, (self.namespace, self.job)
        figures = training_figures(journal.records[-1])
        for name, value in figures.items():
            metrics.training.labels(*labels, name).set(value)
        if journal.status.reward is not None:
            metrics.reward.labels(*labels).set(journal.status.reward)
        held_out = [each.held_out_reward for each in journal.records if each.held_out_reward is not None]
        if held_out:
            metrics.held_out_reward.labels(*labels).set(held_out[-1])
        if journal.status.forecast is not None:
            metrics.forecast.labels(*labels).set(float(journal.status.forecast))
        if journal.status.budget_used is not None:
            metrics.budget.labels(*labels).set(journal.status.budget_used)

    def _count(self, counter: Counter, labels: tuple[str, ...], total: float) -> None:
        """Raise a counter to a growing total."""
        key = (counter._name, *labels)
        if total > self._charged[key]:
            counter.labels(*labels).inc(total - self._charged[key])
            self._charged[key] = total
