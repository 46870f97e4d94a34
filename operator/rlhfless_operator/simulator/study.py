"""The whole comparison: every policy on every scenario, what each means brings, and what the figures rest on."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfless_operator.simulator.scenarios import SCENARIOS
from rlhfless_operator.simulator.simulate import ablate, simulate, sweep, sweep_ratio

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

COMPARED = ("static", "rlhfuse", "paper", "rlhfless")
"""Policies of a sweep."""


@dataclass(frozen=True)
class Part:
    """A piece of the study that is run and written down by itself."""

    section: str
    """`scenarios`, `options` or `sensitivity`."""
    name: str
    run: Callable[[], Result]


def parts(seeds: Sequence[int], sweep_seeds: Sequence[int]) -> Iterator[Part]:
    """All parts, the scenarios first.

    Args:
        seeds: of the scenarios.
        sweep_seeds: of everything else.
    """
    for name in SCENARIOS:
        yield Part("scenarios", name, lambda name=name: simulate(name, seeds))  # type: ignore[misc]
    first = next(iter(SCENARIOS))
    yield Part("options", first, lambda: ablate(first, sweep_seeds))
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


def study(
    path: Path | None,
    seeds: Sequence[int],
    *,
    sweep_seeds: Sequence[int] = range(2),
    sections: Sequence[str] = ("scenarios", "options", "sensitivity"),
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
            if path is not None:
                path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
        on_part(part, section[part.name])
    return done
