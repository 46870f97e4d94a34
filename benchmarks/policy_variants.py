"""Policies and scenarios with something changed: one of our means left out, another τ, a field of the setting swept."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rlhfless_operator.planner.migration_rules import ActorRatio, GlobalRatio
from rlhfless_operator.simulator.policies import POLICIES, ROOFLINE_BATCH, PolicySettings, RuleMaker
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.simulate import simulate, simulate_variants


def ablate(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    """What each of our own means brings: ours without each of them, with each alone, and with none. The form is that of
    `simulate`; `none` comes first."""
    ours = POLICIES["rlhfless"]
    none = replace(ours, rule=None, overlaps_preparation=False, overlaps_learning=False, warms=False)
    variants = {
        "none": none,
        "only migration": replace(none, rule=ours.rule),
        "only warming": replace(none, warms=True),
        "only overlapped preparation": replace(none, overlaps_preparation=True),
        "only overlapped preparation and learning": replace(none, overlaps_preparation=True, overlaps_learning=True),
        "all": ours,
        "without overlapped learning": replace(ours, overlaps_learning=False),
        "without any overlap": replace(ours, overlaps_learning=False, overlaps_preparation=False),
        "without migration": replace(ours, rule=None),
        "without warming": replace(ours, warms=False),
        "receivers compute again": replace(ours, restarts_receiver=True),
    }
    return simulate_variants(scenario, seeds, variants)


def sweep(
    scenario: Scenario,
    field: str,
    values: Iterable[Any],
    seeds: Sequence[int],
    *,
    policies: Sequence[str] = ("static", "rlhfless"),
) -> list[dict[str, Any]]:
    """`simulate` for each value of one of the scenario's fields; `value` is added to each result.

    Args:
        field: a field of the scenario, or `lengths.` and a field of its lengths.
    """
    results = []
    for value in values:
        if field.startswith("lengths."):
            changed = replace(scenario, lengths=replace(scenario.lengths, **{field.removeprefix("lengths."): value}))
        else:
            changed = replace(scenario, **{field: value})
        results.append({"field": field, "value": value, **simulate(changed, seeds, policies=policies)})
    return results


def sweep_ratio(scenario: Scenario, policy: str, ratios: Sequence[float], seeds: Sequence[int]) -> dict[str, Any]:
    """A system whose rule has a ratio τ, at each of several; the form is that of `simulate`, after static actors.

    Args:
        policy: `paper` or `rlhfuse`.
    """
    variants = {"static": POLICIES["static"]} | {f"τ = {ratio:g}": with_ratio(policy, ratio) for ratio in ratios}
    return simulate_variants(scenario, seeds, variants)


def with_ratio(policy: str, ratio: float) -> PolicySettings:
    """A system with another τ.

    Args:
        policy: `paper` or `rlhfuse`.

    Raises:
        ValueError: for a system whose rule has none.
    """
    rules: dict[str, RuleMaker] = {
        "paper": lambda scenario, profile, samples, price: ActorRatio(ratio, scenario.max_batch),
        "rlhfuse": lambda scenario, profile, samples, price: GlobalRatio(
            ratio, ROOFLINE_BATCH, profile.kv_tokens, samples
        ),
    }
    if policy not in rules:
        raise ValueError(f"policy is {policy!r}: only {' and '.join(rules)} have a ratio")
    return replace(POLICIES[policy], rule=rules[policy])  # type: ignore[index]
