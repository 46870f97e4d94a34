"""What the Grafana dashboards show, as data; `grafana.py` makes Grafana's JSON of it.

Every panel asks for the jobs that the variables `namespace` and `job` select. Rates are over the variable `window`,
because a step may take seconds or hours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["lines", "stack", "number", "bars", "states"]


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "lines"
    unit: str = "short"
    """As Grafana names it."""
    width: int = 12
    """Of 24 columns."""


@dataclass(frozen=True)
class Page:
    """One dashboard."""

    title: str
    description: str
    panels: tuple[Panel, ...]


def series(metric: str, /, **labels: str) -> str:
    """The series of the jobs that are shown."""
    chosen = {"namespace": "$namespace", "job": "$job", **labels}
    return metric + "{" + ",".join(f'{name}=~"{value}"' for name, value in chosen.items()) + "}"


def total(metric: str, /, by: str = "", **labels: str) -> str:
    """Sum of a metric as it is now, of everything or by labels."""
    return f"sum by ({by}) ({series(metric, **labels)})"


def within(metric: str, /, by: str = "", **labels: str) -> str:
    """What a counter has grown by in the time that is shown, however often the operator was restarted in it."""
    return f"sum by ({by}) (increase({series(metric, **labels)}[$__range]))"


def pace(metric: str, /, by: str = "", **labels: str) -> str:
    """What a counter grows by in a second, over the window."""
    return f"sum by ({by}) (rate({series(metric, **labels)}[$window]))"


def quantiles(metric: str, by: str, legend: str) -> tuple[Query, ...]:
    """Median and 95th percentile of a histogram, over the window."""
    buckets = pace(f"{metric}_bucket", by=f"{by}, le")
    return tuple(
        Query(f"histogram_quantile({quantile}, {buckets})", f"{legend} p{round(100 * quantile)}")
        for quantile in (0.5, 0.95)
    )


def _number(title: str, description: str, expression: str, unit: str = "short") -> Panel:
    return Panel(title, description, (Query(expression, title),), "number", unit, width=6)


def _by_stage(kind: Kind, title: str, description: str, expression: str, unit: str = "short") -> Panel:
    return Panel(title, description, (Query(expression, "{{stage}}"),), kind, unit)


EACH = "namespace, job"
_JOB = "{{namespace}}/{{job}}"
_COST, _PLANNED, _FORECAST = "rlhfless_cost_total", "rlhfless_cost_plan_total", "rlhfless_cost_forecast_total"
_GPU, _STEPS, _COLD = "rlhfless_gpu_seconds_total", "rlhfless_steps_total", "rlhfless_cold_start_seconds"
_BOUND = total(_PLANNED, EACH, kind="bound")
_PROGRESS = series("rlhfless_job_last_progress_timestamp_seconds")

COST = Page(
    "rlhfless: cost",
    "What jobs cost: by step, stage and job, to completion, and against the cheapest plan and the lower bound. Money "
    "is in the currency of each job's prices.",
    (
        _number("Cost", "Of the jobs shown, in the time shown.", within(_COST)),
        _number("Forecast to completion", "What all jobs shown will have cost when they are done.", total(_FORECAST)),
        _number("Cost per step", "In the time shown.", f"{within(_COST)} / {within(_STEPS)}"),
        _number(
            "Plans above the lower bound",
            "How much more the chosen plans of generation cost than the least that anyone could have paid who knew all "
            "lengths.",
            f"{within(_PLANNED, kind='chosen')} / {within(_PLANNED, kind='bound')} - 1",
            "percentunit",
        ),
        Panel(
            "Cost and forecast by job",
            "Money spent since the operator began, and what the whole job will have cost when it is done.",
            (Query(total(_COST, EACH), _JOB), Query(total(_FORECAST, EACH), f"{_JOB} forecast")),
        ),
        Panel(
            "Cost of a step",
            "Mean over the window.",
            (Query(f"{pace(_COST, EACH)} / ({pace(_STEPS, EACH)} > 0)", _JOB),),
        ),
        _by_stage("stack", "Cost an hour, by stage", "Mean over the window.", f"{pace(_COST, 'stage')} * 3600"),
        _by_stage("bars", "Cost by stage", "In the time shown.", within(_COST, "stage")),
        Panel(
            "Generation: chosen plan, cheapest plan and lower bound",
            "Planned money of the steps since the operator began. The cheapest plan takes longer; no plan goes below "
            "the bound.",
            (Query(total(_PLANNED, "kind"), "{{kind}}"),),
        ),
        Panel(
            "Generation: paid and planned, over the lower bound",
            "1 is what someone who knew all lengths could have had. Evaluations and cold starts are paid for too.",
            (
                Query(f"{total(_COST, EACH, stage='generation')} / {_BOUND}", f"{_JOB} paid"),
                Query(f"{total(_PLANNED, EACH, kind='chosen')} / {_BOUND}", f"{_JOB} planned"),
            ),
        ),
        Panel(
            "Budget used",
            "Share of each job's budget that is spent. A step that would pass 100 % is not begun.",
            (Query(series("rlhfless_budget_used_ratio"), _JOB),),
            "lines",
            "percentunit",
            width=24,
        ),
    ),
)

IDLE = Page(
    "rlhfless: idle time",
    "Where GPU time goes that does no work: idle, starting, switching and draining instances.",
    (
        _number(
            "Idle share",
            "Of the GPU time in the time shown.",
            f"{within(_GPU, state='idle')} / {within(_GPU)}",
            "percentunit",
        ),
        _number("GPU time", "Of instances in any state, in the time shown.", within(_GPU), "s"),
        _number(
            "Cold starts, p95",
            "From asking for an instance until it is ready, in the time shown.",
            f"histogram_quantile(0.95, {within(f'{_COLD}_bucket', 'le')})",
            "s",
        ),
        _number(
            "Work reassigned",
            "Shares that moved to another instance: theirs was lost, or the driver moved them, in the time shown.",
            within("rlhfless_reassignments_total"),
        ),
        Panel(
            "Stages",
            "When each stage worked; the value is the mean number of instances at work.",
            (Query(pace(_GPU, "stage", state="busy").replace("$window", "$__rate_interval"), "{{stage}}"),),
            "states",
            width=24,
        ),
        Panel(
            "Instances by state",
            "GPU-seconds a second.",
            (Query(pace(_GPU, "state"), "{{state}}"),),
            "stack",
        ),
        _by_stage(
            "lines",
            "Idle share by stage",
            "In the window.",
            f"{pace(_GPU, 'stage', state='idle')} / ({pace(_GPU, 'stage')} > 0)",
            "percentunit",
        ),
        Panel(
            "GPU time by stage and state",
            "In the time shown.",
            (Query(within(_GPU, "stage, state"), "{{stage}}, {{state}}"),),
            "bars",
            "s",
        ),
        Panel(
            "Cold starts",
            "From asking for an instance until it is ready.",
            quantiles(_COLD, "stage", "{{stage}}"),
            unit="s",
        ),
        Panel(
            "Generation actors",
            "Wanted by the plan, and ready.",
            (Query(total("rlhfless_generation_actors", "kind"), "{{kind}}"),),
        ),
        Panel(
            "Work reassigned, by reason",
            "Since the operator began.",
            (Query(total("rlhfless_reassignments_total", "reason"), "{{reason}}"),),
        ),
        Panel(
            "Instances asleep",
            "Kept without a GPU, with their process and what they hold in the host's memory. They cost nothing.",
            (Query(total("rlhfless_instances_asleep", "stage"), "{{stage}}"),),
        ),
        Panel(
            "New weights read, by distance to the learner",
            "Bytes that generation instances read in the time shown: on the learner's node, in its zone, or farther.",
            (Query(within("rlhfless_weights_read_bytes_total", "distance"), "{{distance}}"),),
            "bars",
            "bytes",
        ),
    ),
)


def _training(title: str, description: str, metric: str) -> Panel:
    return Panel(title, description, (Query(series("rlhfless_training", metric=metric), _JOB),), width=8)


TRAINING = Page(
    "rlhfless: training",
    "What is learnt, step by step.",
    (
        Panel("Reward", "Mean over a step's samples.", (Query(series("rlhfless_reward"), _JOB),)),
        Panel(
            "Evaluation",
            "Mean reward on prompts that are not trained on.",
            (Query(series("rlhfless_evaluation_reward"), _JOB),),
        ),
        Panel(
            "Response lengths",
            "Tokens of a step's responses.",
            (Query(series("rlhfless_response_tokens"), f"{_JOB} {{{{statistic}}}}"),),
        ),
        Panel(
            "Steps",
            "Finished since the operator began, and wanted.",
            (Query(total(_STEPS, EACH), _JOB), Query(total("rlhfless_job_steps", EACH), f"{_JOB} wanted")),
        ),
        _training("KL", "Divergence from the reference model.", "kl"),
        _training("Entropy", "Of the policy, in nats a token.", "entropy"),
        _training("Clip fraction", "Share of the tokens whose ratio was clipped.", "clip_fraction"),
        _training("Gradient norm", "Before it is clipped.", "grad_norm"),
        _training("Loss", "Of the policy.", "loss"),
        Panel("Steps an hour", "In the window.", (Query(f"{pace(_STEPS, EACH)} * 3600", _JOB),), width=8),
        Panel(
            "Steps under way",
            "Steps in each stage. An asynchronous job has several at a time.",
            (Query(total("rlhfless_steps_under_way", f"{EACH}, stage"), f"{_JOB} {{{{stage}}}}"),),
            "stack",
            width=24,
        ),
    ),
)

_OPERATOR_ONLY = "and on (instance) rlhfless_operator_jobs"

OPERATOR = Page(
    "rlhfless: operator",
    "Whether the operator is well: its jobs, its pace and its process.",
    (
        _number("Jobs in hand", "Of all operators.", "sum(rlhfless_operator_jobs)"),
        _number(
            "Longest without progress",
            "Time since the last step of the running job that has waited longest.",
            f"max(time() - {_PROGRESS} and on ({EACH}) {series('rlhfless_job_phase', phase='Running')} == 1)",
            "s",
        ),
        Panel(
            "Jobs by phase",
            "Of the jobs shown.",
            (Query(total("rlhfless_job_phase", "phase"), "{{phase}}"),),
            "stack",
        ),
        Panel(
            "Between stages",
            "From the end of a stage to the first request of the next: the operator's own overhead.",
            tuple(
                Query(
                    f"histogram_quantile({quantile}, sum by (le) (rate(rlhfless_control_seconds_bucket[$window])))",
                    f"p{round(100 * quantile)}",
                )
                for quantile in (0.5, 0.95)
            ),
            unit="s",
        ),
        Panel(
            "Time of a stage",
            "How long a stage of a step takes.",
            quantiles("rlhfless_stage_duration_seconds", "stage", "{{stage}}"),
            unit="s",
        ),
        Panel(
            "Status writes a second",
            "Requests to the API server that write a job's status.",
            (Query("sum(rate(rlhfless_operator_status_writes_total[$window]))", "writes"),),
        ),
        Panel("Time without progress", "Since the job's last step.", (Query(f"time() - {_PROGRESS}", _JOB),), unit="s"),
        Panel(
            "Memory",
            "Of the operator's process.",
            (Query(f"process_resident_memory_bytes {_OPERATOR_ONLY}", "{{instance}}"),),
            unit="bytes",
        ),
        Panel(
            "CPU",
            "Cores that the operator's process uses.",
            (Query(f"rate(process_cpu_seconds_total[$window]) {_OPERATOR_ONLY}", "{{instance}}"),),
        ),
    ),
)

PAGES: Mapping[str, Page] = {"cost": COST, "idle": IDLE, "training": TRAINING, "operator": OPERATOR}
"""The dashboards by the names of their files."""
