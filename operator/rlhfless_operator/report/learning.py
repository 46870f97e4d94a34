"""The report's charts of learning."""

import math
from collections.abc import Sequence
from html import escape

from rlhfless_operator.formatting import format_number
from rlhfless_operator.records.metric_catalogue import STEP_METRICS, metric_named
from rlhfless_operator.report.charts import Mark, Series, line_chart, spark
from rlhfless_operator.report.run import Run


def charts(run: Run) -> str:
    """Return charts of reward with evaluations, KL, lengths, truncation, entropy, norms and mismatch, if the run has
    them."""
    if not run.trained and not run.held_out_rewards:
        return '<p class="none">No step is finished yet.</p>'
    figures = [_reward(run), *_reward_terms(run)]
    figures += [
        metric_chart(run, names, title, note)
        for names, title, note in (
            ((("kl/reference", "KL"),), "KL to the reference", "Mean per token, in nats."),
            ((("lengths/mean", "mean"), ("lengths/max", "longest")), "Response length", "Tokens, EOS included."),
            ((("policy/entropy", "entropy"),), "Entropy", "Mean per token, in nats."),
            ((("truncated", "truncated"),), "Truncated responses", "Share that hit the longest response."),
            ((("policy/gradient_norm", "norm"),), "Gradient norm", "Before clipping."),
            (
                (("mismatch/mean_exp_abs", "mean exp|Δ|"),),
                "Engine against trainer",
                "Of log-probabilities: 1 is agreement, above 1.05 look for the cause. Stale weights (async) are one.",
            ),
        )
        if any(name in record.metrics for record in run.trained for name, _ in names)
    ]
    return f'<div class="charts">{"".join(figures)}</div>'


def all_metrics(run: Run) -> str:
    """Return a table of all metrics, each with a small curve."""
    names = sorted({name for record in run.trained for name in record.metrics})
    if not names:
        return ""
    rewards = _reward_names(run)
    rows = ""
    for name in names:
        values = [record.metric(name) for record in run.trained]
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            continue
        cells = "".join(
            f'<td class="n">{format_number(value)}</td>' for value in (finite[0], finite[-1], min(finite), max(finite))
        )
        known = metric_named(name, STEP_METRICS, rewards)
        meaning = f' title="{escape(known.meaning)}"' if known else ""
        unit = f"<td>{known.unit if known else ''}</td>"
        rows += f"<tr><td{meaning}>{escape(name)}</td><td>{spark(values)}</td>{cells}{unit}</tr>"
    head = "<tr><th>metric</th><th>course</th>" + "".join(
        f'<th class="n">{title}</th>' for title in ("first", "last", "least", "greatest")
    )
    return (
        f'<details class="card"><summary>{len(names)} metrics</summary><div class="scroll">'
        f"<table>{head}<th>unit</th></tr>{rows}</table></div></details>"
    )


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the centred moving average over a twentieth of the values on each side. Gaps stay gaps."""
    reach = len(values) // 20
    result = []
    for index, value in enumerate(values):
        near = [other for other in values[max(0, index - reach) : index + reach + 1] if math.isfinite(other)]
        result.append(sum(near) / len(near) if math.isfinite(value) else math.nan)
    return result


def _reward(run: Run) -> str:
    xs = [float(record.step) for record in run.trained]
    rewards = [record.metric("reward") for record in run.trained]
    marks = [
        Mark(float(step), value, f"held-out reward after step {step}: {value:.3f}")
        for step, value in run.held_out_rewards
    ]
    series = [Series("each step", rewards, "c1 faint"), Series("smoothed", smoothed(rewards), "c1")]
    if series[0].values == series[1].values:
        series = [Series("reward", rewards, "c1")]
    note = "Mean reward of the step's samples."
    if marks:
        note += f" Dots: held-out reward, last {marks[-1].y:.3f}."
    xs = xs or [mark.x for mark in marks]
    if not rewards:
        series = [Series("reward", [math.nan] * len(xs), "c1")]
    return line_chart(xs, series, title="Reward", note=note, marks=marks)


def _reward_terms(run: Run) -> list[str]:
    """Return a chart of the curves of all rewards, if the job has several."""
    names = [name for name in _reward_names(run) if any(f"reward/{name}" in record.metrics for record in run.trained)]
    note = "Mean of each reward before weighting, over the samples that it scored."
    return [metric_chart(run, [(f"reward/{name}", name) for name in names], "Rewards", note)] if len(names) > 1 else []


def _reward_names(run: Run) -> list[str]:
    return [str(reward.get("name")) for reward in run.spec.get("rewards") or []]


def metric_chart(run: Run, names: Sequence[tuple[str, str]], title: str, note: str) -> str:
    """Draw the curves of some metrics, (name, label) each. A step without a value is a gap."""
    xs = [float(record.step) for record in run.trained]
    series = [
        Series(label, [record.metric(name) for record in run.trained], f"c{number % 6 + 1}")
        for number, (name, label) in enumerate(names)
        if any(name in record.metrics for record in run.trained)
    ]
    return line_chart(xs, series, title=title, note=note, from_zero=True)
