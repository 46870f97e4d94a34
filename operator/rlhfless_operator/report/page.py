"""`report.html`: one self-contained page about a run."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from rlhfless_functions import artifacts
from rlhfless_operator.formatting import format_clock, format_money, format_number, format_percent
from rlhfless_operator.records.barren_steps import barren_stretches, describe
from rlhfless_operator.records.mismatch import account
from rlhfless_operator.report import data, drafting, learning, planning, resources
from rlhfless_operator.report.run import Run, read_run
from rlhfless_operator.report.samples import samples_section, training_section


def write_report(run_folder: str) -> str:
    """Write `report.html` into a run's folder.

    Args:
        run_folder: path or fsspec URI of the job's folder; the run may be unfinished.

    Returns:
        URI of the report.

    Raises:
        ValueError: the folder holds no run, or a file in it is damaged.
        ArtifactUnwritableError: the folder can't be written to.
    """
    uri = artifacts.join(run_folder, "report.html")
    artifacts.write_bytes(uri, report(read_run(run_folder)).encode())
    return uri


def report(run: Run) -> str:
    """Return the whole page."""
    sections = [
        ("Learning", learning.charts(run)),
        ("Data", data.section(run)),
        ("Time", resources.time(run)),
        ("Instances", resources.instances(run)),
        ("Cost", resources.cost(run)),
        ("Planning", planning.section(run)),
        ("Drafting", drafting.section(run)),
        ("Samples", samples_section(run.samples)),
        ("Samples of training", training_section(run.samples)),
        ("All metrics", learning.all_metrics(run)),
        ("Configuration", _configuration(run)),
    ]
    body = _header(run)
    body += "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections if content)
    return page(f"{run.name} – rlhfless", body)


def page(title: str, body: str) -> str:
    """Return a page that loads nothing: its security policy forbids it."""
    style = files("rlhfless_operator.report").joinpath("style.css").read_text()
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>\n{style}</style></head>\n"
        f"<body><main>{body}<footer>Written by rlhfless. Hold the pointer over a chart for exact values."
        "</footer></main></body></html>\n"
    )


def tiles(entries: Sequence[tuple[str, str, str]]) -> str:
    """Return tiles with a large figure each: (label, value, remark)."""
    cells = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(remark)}</small></div>'
        for label, value, remark in entries
    )
    return f'<div class="tiles">{cells}</div>'


def _header(run: Run) -> str:
    model = str((run.spec.get("model") or {}).get("source") or "").rstrip("/").rpartition("/")[2]
    subtitle = " · ".join(part for part in (run.algorithm, model and f"model {model}", _seed(run)) if part)
    entries = []
    if run.held_out_rewards:
        (first_step, before), (last_step, after) = run.held_out_rewards[0], run.held_out_rewards[-1]
        remark = f"step {first_step} → {last_step}" if last_step > first_step else f"step {first_step}"
        value = f"{before:.3f} → {after:.3f}" if last_step > first_step else f"{before:.3f}"
        entries.append(("Held-out reward", value, remark))
    rewards = [record.metrics["reward"] for record in run.trained if "reward" in record.metrics]
    if rewards:
        entries.append(("Reward", f"{rewards[0]:.3f} → {rewards[-1]:.3f}", "first and last step"))
    steps = str(len(run.trained))
    if run.trained:
        mean = sum(record.seconds for record in run.trained) / len(run.trained)
        entries.append(("Steps", steps, f"{format_number(mean)} s each"))
    entries.append(("Time", format_clock(run.seconds), "wall clock"))
    entries.append(("Instance time", format_clock(run.instance_seconds), f"{format_number(run.instance_seconds)} s"))
    entries.append(("Cost", format_money(run.cost, run.currency), "in every state"))
    if run.forecast is not None and str(run.status.get("phase")) != "Succeeded":
        entries.append(("Forecast", format_money(run.forecast, run.currency), "cost of the whole job"))
    if run.budget_used is not None:
        entries.append(("Budget", format_percent(run.budget_used), "of it is spent"))
    notices = _notice(run) + "".join(f'<p class="notice">{escape(warning)}</p>' for warning in _warnings(run))
    return f"<h1>{escape(run.name)}</h1><p class=subtitle>{escape(subtitle)}</p>{notices}{tiles(entries)}"


def _seed(run: Run) -> str:
    return f"seed {run.spec['seed']}" if "seed" in run.spec else ""


def _notice(run: Run) -> str:
    phase, message = str(run.status.get("phase") or ""), str(run.status.get("message") or "")
    if phase in ("", "Succeeded"):
        return ""
    return f'<p class="notice">{escape(": ".join(part for part in (phase, message) if part))}</p>'


def _warnings(run: Run) -> Iterator[str]:
    yield from map(describe, barren_stretches(run.records))
    if disagreement := account(run.records):
        yield disagreement


def _configuration(run: Run) -> str:
    return f'<details class="card"><summary>job.yaml</summary><pre>{escape(run.job_text)}</pre></details>'
