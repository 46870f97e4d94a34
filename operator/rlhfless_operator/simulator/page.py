"""A page about a scenario: the instances of each policy over time, time against cost, idle time, and planning time."""

import time
from collections.abc import Sequence
from html import escape
from typing import Any

from rlhfless_operator.planner.step.loads import SampleLoad
from rlhfless_operator.planner.step.planning import Limits, plan
from rlhfless_operator.records.record import SpanRecord
from rlhfless_operator.report.charts import Mark, Series, legend, line_chart, share_bar
from rlhfless_operator.report.gantt import gantt, lanes
from rlhfless_operator.report.page import page
from rlhfless_operator.simulator.policies import POLICIES
from rlhfless_operator.simulator.scenarios import Scenario, find_scenario
from rlhfless_operator.simulator.simulate import Progress, fitted, simulate
from rlhfless_operator.simulator.steps import StepResult, run_policy
from rlhfless_operator.simulator.traces import RecordedTrace, Trace, generate

WEIGHTS = (0.05, 0.2, 0.4, 0.6, 0.8)


def scenario_page(
    scenario: str | Scenario,
    seeds: Sequence[int],
    *,
    weights: Sequence[float] = WEIGHTS,
    sizes: Sequence[int] = (1_000, 4_000, 16_000, 64_000),
    trace: Trace | RecordedTrace | None = None,
    result: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> str:
    """Return the whole page as HTML.

    Args:
        seeds: of `simulate`; the Gantt charts are of the first one's last step.
        weights: λ of the points of our front.
        sizes: numbers of samples of the plans that are timed.
        trace: lengths of a real run instead of the scenario's.
        result: of `simulate`, if there is one already.
        progress: see `simulate`.
    """
    found = find_scenario(scenario) if isinstance(scenario, str) else scenario
    if trace is not None:
        found = fitted(found, trace)
    result = result or simulate(found, seeds, trace=trace, progress=progress)
    front = [
        simulate(found, seeds, policies=["rlhfless"], trace=trace, cost_weight=weight, progress=progress)["policies"][0]
        for weight in weights
    ]
    sections = [
        ("Time against cost", _front(result["policies"], front)),
        ("Held and idle", _idle(result["policies"])),
        ("One step", _gantts(found, seeds[0], trace)),
        ("The planner's own cost", _own_cost(found, sizes)),
    ]
    body = f"<header><h1>{escape(found.name)}</h1><p>{len(seeds)} seeds, λ = {found.cost_weight:g}</p></header>"
    body += "".join(f"<section><h2>{title}</h2>{content}</section>" for title, content in sections)
    return page(f"{found.name} – simulation", body)


def _front(policies: Sequence[dict[str, Any]], front: Sequence[dict[str, Any]]) -> str:
    ours = sorted(front, key=lambda row: float(row["seconds"]))
    marks = [
        Mark(
            row["seconds"],
            row["gpu_seconds"],
            f"{row['policy']}: {row['seconds']:.1f} s, {row['gpu_seconds']:.0f} GPU-seconds",
        )
        for row in policies
    ]
    names = ", ".join(f"{row['policy']} {row['seconds']:.1f} s and {row['gpu_seconds']:.0f}" for row in policies)
    return line_chart(
        [row["seconds"] for row in ours],
        [Series("rlhfless at several λ", [row["gpu_seconds"] for row in ours], "c1")],
        title="GPU-seconds of a step against its seconds",
        note=f"The line is ours from dear to cheap time; the points are the policies: {names}.",
        x_name="seconds",
        marks=marks,
        from_zero=True,
    )


def _idle(policies: Sequence[dict[str, Any]]) -> str:
    most = max(row["gpu_seconds"] for row in policies)
    rows = legend([("busy", "busy"), ("idle", "idle"), ("not held", "unheld")])
    for row in policies:
        held, idle = row["gpu_seconds"], row["gpu_seconds"] * row["idle_share"]
        bar = share_bar([("busy", held - idle, "busy"), ("idle", idle, "idle"), ("not held", most - held, "unheld")])
        rows += f"<p>{escape(row['policy'])}: {held:.0f} GPU-seconds, {row['idle_share']:.0%} idle</p>{bar}"
    return rows


def _gantts(scenario: Scenario, seed: int, trace: Trace | RecordedTrace | None) -> str:
    lengths = trace or scenario.draw_trace(seed)
    content = legend([(state, state) for state in ("starting", "busy", "idle")])
    for name, settings in POLICIES.items():
        step = run_policy(scenario, settings, lengths, seed)[-1]
        charts = gantt(lanes(_spans(scenario, step, everything=settings.holds_everything)), 0.0, step.seconds)
        content += f"<h3>{escape(name)}</h3>{charts}"
    return content


def _spans(scenario: Scenario, step: StepResult, *, everything: bool) -> list[SpanRecord]:
    """Return the states of a step's instances. A row of the learner is a GPU while it is held, waiting included."""
    offset = max(0.0, -min(each.begin for each in step.held))
    spans = []

    def add(instance: str, stage: str, state: str, start: float, end: float) -> None:
        if end > start:
            spans.append(
                SpanRecord.model_validate(
                    {"instance": instance, "stage": stage, "state": state, "start": start + offset, "end": end + offset}
                )
            )

    start = scenario.startup_seconds + scenario.weight_load_seconds
    for each in step.held:
        add(each.name, "generation", "starting", each.begin, each.begin + start)
        add(each.name, "generation", "busy", each.begin + start, each.end)
        if everything:
            add(each.name, "generation", "idle", each.end, step.generation_seconds)
    waking = 0.0 if everything else scenario.trainer_start_seconds
    holds = [*step.trainer.let_go, *((asked, step.trainer.end) for asked in step.trainer.asked)]
    for number, (asked, end) in enumerate(holds):
        name = f"gpu-{number}"
        add(name, "learning", "starting", asked, min(asked + waking, end))
        add(name, "learning", "busy", asked + waking, end)
    return spans


def _own_cost(scenario: Scenario, sizes: Sequence[int]) -> str:
    """Return the processor time of a plan for more and more samples of this scenario's lengths."""
    profile = scenario.profile()
    seconds = []
    for size in sizes:
        prompts = max(1, size // scenario.samples_per_prompt)
        trace = generate(scenario.lengths, epochs=1, prompts=prompts, samples=scenario.samples_per_prompt, seed=0)
        samples = [
            SampleLoad(prompt, index, int(trace.prompt_tokens[prompt]), float(length))
            for prompt, lengths in enumerate(trace.response_tokens[0].tolist())
            for index, length in enumerate(lengths)
        ]
        begin = time.process_time()
        plan("cost", samples, profile.latency, Limits(max_instances=1024), cost_weight=scenario.cost_weight)
        seconds.append(1000 * (time.process_time() - begin))
    return line_chart(
        list(sizes),
        [Series("milliseconds", seconds, "c1")],
        title="Milliseconds of a plan",
        note="Processor time from samples to shares, on at most 1,024 actors.",
        x_name="samples",
        from_zero=True,
    )
