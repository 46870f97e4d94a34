"""The whole comparison: every policy on every scenario, what each means brings, and what the figures rest on."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.planning.policy_limits import scenario_limits
from benchmarks.planning.policy_variants import ablate, compare, effects, sweep, sweep_ratio, told
from benchmarks.shared.records import write_record
from rlhfless_operator.simulator.policies import COMPLETE
from rlhfless_operator.simulator.scenarios import SCENARIOS, STUDIED, Scenario

Result = dict[str, Any]

SWEEPS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("cost_weight", (0.05, 0.2, 0.4, 0.6, 0.8)),
    ("prompts_per_step", (64, 128, 256, 640)),
    ("training_utilisation", (0.25, 0.35, 0.5)),
    ("gpus", (8, 16, 32, 64)),
    ("lengths.longest", (1024, 2048, 8192)),
    ("lengths.runaways", (0.0, 0.01, 0.05)),
    ("lengths.noise", (0.1, 0.25, 0.5)),
    ("startup_seconds", (0.5, 2.0, 6.0, 30.0)),
)
"""What the first scenario is swept over: λ, what is not published of the paper's setting, and what is uncertain."""

RATIOS = (("paper", (0.5, 0.7, 0.9, 0.95, 1.0)), ("rlhfuse", (0.8, 0.9, 0.95, 0.98)))
"""τ of the systems that have one."""

COMPARED = ("static", "rlhfuse", "paper", COMPLETE)
"""Policies of a sweep."""


SECTIONS = ("scenarios", "options", "effects", "told", "sensitivity", "limits")
"""Every policy on every scenario; each means alone and left out; each mend alone and left out; what the oracle's lead
is made of; what the figures rest on; what anyone could reach."""

BATCHES = (0.5, 0.75, 1.0, 1.5)
UTILISATIONS = (0.2, 0.35)
"""Of the paper's scenarios: how much larger the batch, and how well learning uses the hardware, of which the published
settings say nothing."""


@dataclass(frozen=True)
class Part:
    """A piece of the study that is run and written down by itself."""

    section: str
    """One of `SECTIONS`."""
    name: str
    run: Callable[[], Result]


def parts(seeds: Sequence[int], sweep_seeds: Sequence[int]) -> Iterator[Part]:
    """All parts, the scenarios first.

    Args:
        seeds: of the scenarios and of what anyone could reach.
        sweep_seeds: of everything else.
    """
    for name in STUDIED:
        scenario = SCENARIOS[name]
        yield Part(
            "scenarios",
            name,
            lambda scenario=scenario: compare(scenario, seeds, sweep_seeds[:1]),  # type: ignore[misc]
        )
    first = next(iter(SCENARIOS.values()))
    yield Part("options", first.name, lambda: ablate(first, sweep_seeds))
    yield Part("effects", first.name, lambda: effects(first, sweep_seeds))
    yield Part("told", first.name, lambda: told(first, sweep_seeds))
    for policy, ratios in RATIOS:
        yield Part(
            "sensitivity",
            f"τ of {policy}",
            lambda policy=policy, ratios=ratios: sweep_ratio(first, policy, ratios, sweep_seeds),  # type: ignore[misc]
        )
    for field, values in SWEEPS:
        for value in values:
            yield Part(
                "sensitivity",
                f"{field} = {value}",
                lambda field=field, value=value: sweep(  # type: ignore[misc]
                    first, field, [value], sweep_seeds, policies=COMPARED
                )[0],
            )
    yield from _limit_parts(seeds)


def _limits(scenario: Scenario, seeds: Sequence[int]) -> Result:
    return scenario_limits(scenario, seeds, speed=1.5, saving=0.55)


def _limit_parts(seeds: Sequence[int]) -> Iterator[Part]:
    for name in STUDIED:
        scenario = SCENARIOS[name]
        yield Part("limits", name, lambda scenario=scenario: _limits(scenario, seeds))  # type: ignore[misc]
    for name in ("paper-3b-gsm8k-grpo", "paper-7b-gsm8k-grpo", "paper-7b-gsm8k-ppo"):
        for batch, utilisation in itertools.product(BATCHES, UTILISATIONS):
            scenario = SCENARIOS[name]
            changed = replace(
                scenario,
                name=f"{name}, {batch:g} × the batch, utilisation {utilisation:g}",
                prompts_per_step=int(batch * scenario.prompts_per_step),
                training_utilisation=utilisation,
                preparation_utilisation=utilisation / scenario.training_utilisation * scenario.preparation_utilisation,
            )
            yield Part("limits", changed.name, lambda changed=changed: _limits(changed, seeds))  # type: ignore[misc]


def study(
    path: Path | None,
    seeds: Sequence[int],
    *,
    sweep_seeds: Sequence[int] = range(2),
    sections: Sequence[str] = SECTIONS,
    on_part: Callable[[Part, Result], None] = lambda part, result: None,
) -> dict[str, dict[str, Result]]:
    """Run what is not in the file yet.

    Args:
        path: JSON file that is written after each part, and read first: a study that was interrupted goes on. None
            keeps nothing.
        sections: which of the study.
        on_part: told of each result, those that were there already included.

    Returns:
        Results by section and name.
    """
    done: dict[str, dict[str, Result]] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    for part in parts(seeds, sweep_seeds):
        if part.section not in sections:
            continue
        section = done.setdefault(part.section, {})
        if part.name not in section:
            section[part.name] = part.run()
            write_record(done, path)
        on_part(part, section[part.name])
    return done
