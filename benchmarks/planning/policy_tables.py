"""A study's results as Markdown, between the marks of a page."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.shared.pages import replace_between
from rlhfless_operator.simulator.asynchronous.compare import HEADINGS, cells

Result = Mapping[str, Any]


def write_tables(results: Mapping[str, Mapping[str, Result]], page: Path) -> None:
    """Replace what stands between `<!-- NAME -->` and `<!-- end of NAME -->` for each section of the results.

    Raises:
        ValueError: if the page has no such marks.
    """
    makers = {
        "scenarios": scenario_tables,
        "options": option_table,
        "effects": option_table,
        "told": option_table,
        "sensitivity": sensitivity_tables,
        "limits": limit_table,
        "asynchronous": asynchronous_tables,
        "published": published_table,
    }
    for name, section in results.items():
        replace_between(page, name, makers[name](section))


def scenario_tables(section: Mapping[str, Result]) -> str:
    """A table for each scenario, each policy beside the first."""
    return "\n".join(_scenario_table(result) for result in section.values())


def option_table(section: Mapping[str, Result]) -> str:
    """What each means brings alone, and what is lost without it."""
    lines = ["| means | seconds | GPU-seconds | idle | of the bound |", "|---|--:|--:|--:|--:|"]
    for result in section.values():
        lines += [
            f"| {row['policy']} | {row['seconds']:.1f} | {row['gpu_seconds']:,.0f} | {row['idle_share']:.0%} |"
            f" {row['lower_bound_share']:.0%} |"
            for row in result["policies"]
        ]
    return "\n".join(lines) + "\n"


def sensitivity_tables(section: Mapping[str, Result]) -> str:
    """The systems with a ratio at each, and all that are compared at each value of what was swept."""
    ratios, swept = [], []
    for name, result in section.items():
        static = result["policies"][0]
        if "field" not in result:
            ratios += [
                f"| {name.removeprefix('τ of ')} | {row['policy'].removeprefix('τ = ')} | {_beside(row, static)} |"
                for row in result["policies"][1:]
            ]
            continue
        cells = " | ".join(f"{row['seconds']:.1f} s, {row['gpu_seconds']:,.0f}" for row in result["policies"])
        ours = result["policies"][-1]
        swept.append(
            f"| {_FIELDS.get(result['field'], result['field'])} | {result['value']:g} | {cells} |"
            f" {static['seconds'] / ours['seconds']:.2f}× | {1 - ours['gpu_seconds'] / static['gpu_seconds']:.0%} |"
            f" {ours['lower_bound_share']:.0%} |"
        )
    head = "| what | value | static | rlhfuse | paper | rlhfless | speed | cheaper by | of the bound |\n"
    tables = [
        head + "|---|--:|--:|--:|--:|--:|--:|--:|--:|\n" + "\n".join(swept) + "\n" if swept else "",
        "| policy | τ | seconds | GPU-seconds | speed | cheaper by |\n|---|--:|--:|--:|--:|--:|\n"
        + "\n".join(ratios)
        + "\n"
        if ratios
        else "",
    ]
    return "\n".join(table for table in tables if table)


def limit_table(section: Mapping[str, Result]) -> str:
    """What is out of everyone's reach beside static actors."""
    first = next(iter(section.values()))
    lines = [
        f"| scenario | static | most saved at {first['speed']:g}× | fastest at {first['saving']:.0%} saved |",
        "|---|--:|--:|--:|",
    ]
    for name, result in section.items():
        saving, speed = result["most_saving"], result["most_speed"]
        lines.append(
            f"| {name} | {result['seconds']:.1f} s, {result['gpu_seconds']:,.0f} |"
            f" {_within_reach(None if saving is None else f'{saving:.0%}', result['saving_seeds'], result['seeds'])} |"
            f" {_within_reach(None if speed is None else f'{speed:.2f}×', result['speed_seeds'], result['seeds'])} |"
        )
    return "\n".join(lines) + "\n"


def asynchronous_tables(section: Mapping[str, Result]) -> str:
    """The first scenario in full, and of all scenarios how fast each system is beside the first."""
    first = next(iter(section.values()))
    own = [
        f"| policy | {' | '.join(HEADINGS)} |",
        f"|---|{'--:|' * len(HEADINGS)}",
        *(f"| {row['policy']} | {' | '.join(cells(row, first['policies'][0]))} |" for row in first["policies"]),
    ]
    names = [row["policy"] for row in first["policies"]]
    every = [f"| scenario | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for name, result in section.items():
        static, *_ = result["policies"]
        speeds = {
            row["policy"]: f"{static['seconds'] / row['seconds']:.2f}×,"
            f" {1 - row['gpu_seconds'] / static['gpu_seconds']:.0%}"
            for row in result["policies"]
        }
        # Not every system has been run on every scenario.
        every.append(f"| {name} | {' | '.join(speeds.get(policy, '–') for policy in names)} |")
    heads = f"{first['scenario']}:", "Speed, and how much cheaper, beside static actors, in all scenarios:"
    return re.sub(r"-0%", "0%", "\n".join([heads[0], "", *own, "", heads[1], "", *every]) + "\n")


def published_table(section: Mapping[str, Result]) -> str:
    """What peers measured beside what is simulated of their setting."""
    lines = [
        "| setting | system | step: measured | simulated | a synchronous one: measured | simulated | speed: measured |"
        " simulated |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for name, result in section.items():
        static = result["synchronous"]
        for row in result["asynchronous"]:
            both = ("measured", "simulated")
            steps = " | ".join(f"{each[which]:.0f} s" for each in (row, static) for which in both)
            speeds = " | ".join(f"{static[which] / row[which]:.2f}×" for which in both)
            lines.append(f"| {name} | {row['what']} | {steps} | {speeds} |")
    return "\n".join(lines) + "\n"


def _within_reach(value: str | None, reached: int, seeds: int) -> str:
    if value is None:
        return "out of reach"
    return value if reached == seeds else f"{value} ({reached} of {seeds} seeds)"


_FIELDS = {
    "cost_weight": "λ",
    "prompts_per_step": "prompts in a step",
    "training_utilisation": "utilisation in learning",
    "gpus": "GPUs",
    "lengths.longest": "longest response",
    "lengths.runaways": "runaways",
    "lengths.noise": "noise in a group (prediction error)",
    "startup_seconds": "waking an instance, s",
}


def _scenario_table(result: Result) -> str:
    first = result["policies"][0]
    lines = [
        f"### {result['scenario']}",
        "",
        "| policy | seconds | GPU-seconds | $ a step | idle | of the bound | speed | cheaper by | first epoch |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {row['policy']} | {row['seconds']:.1f} ± {row['seconds_std']:.1f} |"
        f" {row['gpu_seconds']:,.0f} ± {row['gpu_seconds_std']:,.0f} | {row['cost']:.3f} |"
        f" {row['idle_share']:.0%} | {row['lower_bound_share']:.0%} | {first['seconds'] / row['seconds']:.2f}× |"
        f" {1 - row['gpu_seconds'] / first['gpu_seconds']:.0%} |"
        f" {row['first_epoch']['seconds']:.1f} s, {row['first_epoch']['gpu_seconds']:,.0f} |"
        for row in result["policies"]
    ]
    tuned = "; ".join(f"{policy}: {words}" for policy, words in result.get("tuned", {}).items())
    lines += ["", f"Tuned here: {tuned}."] if tuned else []
    return re.sub(r"-0%", "0%", "\n".join(lines)) + "\n"


def _beside(row: Mapping[str, Any], static: Mapping[str, Any]) -> str:
    return (
        f"{row['seconds']:.1f} | {row['gpu_seconds']:,.0f} | {static['seconds'] / row['seconds']:.2f}× |"
        f" {1 - row['gpu_seconds'] / static['gpu_seconds']:.0%}"
    )
