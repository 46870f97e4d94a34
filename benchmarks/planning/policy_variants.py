"""Policies and scenarios with something changed: one of our means left out, another τ, a field of the setting swept."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rlhfless_operator.planner.latency.linear import InstanceProfile
from rlhfless_operator.planner.moves.migration import Rule
from rlhfless_operator.planner.moves.rules import ActorRatio, Repack, Saving
from rlhfless_operator.simulator.global_ratio import GlobalRatio
from rlhfless_operator.simulator.policies import (
    COMPLETE,
    POLICIES,
    ROOFLINE_BATCH,
    PolicySettings,
    RuleMaker,
    Told,
    find_policy,
)
from rlhfless_operator.simulator.scenarios import Scenario
from rlhfless_operator.simulator.simulate import simulate, simulate_variants


def ablate(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    """What each of our own means brings: ours without each of them, with each alone, and with none. The form is that of
    `simulate`; `none` comes first."""
    ours = find_policy(COMPLETE)
    none = replace(ours, rule=None, overlaps_preparation=False, overlaps_learning=False, warms=False, may_hold=False)
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
        "without holding": replace(ours, may_hold=False),
        "receivers compute again": replace(ours, restarts_receiver=True, rule=recomputing),
    }
    return simulate_variants(scenario, seeds, variants)


def effects(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    """What each mend of the forecast and of the learner brings: alone, all together, and all but one. The form is that
    of `simulate`; `none` comes first."""
    ours = find_policy(COMPLETE)
    mends: dict[str, dict[str, Any]] = {
        "a forecast that knows waiting": {"knows_batch": False},
        "a learner that begins and lets go on what has come": {"paces": False},
        "receivers that keep their contexts": {"restarts_receiver": True, "rule": recomputing},
        "GPUs that may be held": {"may_hold": False},
    }
    off = {name: value for without in mends.values() for name, value in without.items()}
    variants = {"none": replace(ours, **off)}
    for name, without in mends.items():
        variants[f"only {name}"] = replace(ours, **{field: off[field] for field in off.keys() - without.keys()})
    variants["all"] = ours
    for name, without in mends.items():
        variants[f"without {name}"] = replace(ours, **without)
    return simulate_variants(scenario, seeds, variants)


def recomputing(scenario: Scenario, profile: InstanceProfile, samples: int, price: float) -> Rule:
    """Our rule where receivers compute their contexts again, and it knows."""
    make = find_policy(COMPLETE).rule
    assert make is not None
    rule = make(scenario, profile, samples, price)
    assert isinstance(rule, Saving)
    return replace(rule, restarts_receiver=True)


def told(scenario: Scenario, seeds: Sequence[int]) -> dict[str, Any]:
    """What separates ours from the oracle: ours, told one thing at a time. The form is that of `simulate`."""
    ours = find_policy(COMPLETE)
    parts: dict[str, tuple[Told, ...]] = {
        "rlhfless": (),
        "told when groups are complete": ("arrivals",),
        "told what remains, for moves": ("migration",),
        "told both": ("arrivals", "migration"),
        "told the lengths, for the division": ("division",),
        "told the lengths for division and moves": ("division", "migration"),
        "told the lengths of the long ones alone, for both": ("long",),
        "told the lengths of all others, for both": ("short",),
        "oracle": ("division", "migration", "arrivals"),
    }
    variants = {name: replace(ours, told=frozenset(what)) for name, what in parts.items()}
    results = simulate_variants(scenario, seeds, variants)
    free = replace(scenario, trainer_start_seconds=0.0)
    (row,) = simulate_variants(free, seeds, {"rlhfless, the learner starts at once": ours})["policies"]
    results["policies"].append(row)
    return results


def sweep(
    scenario: Scenario,
    field: str,
    values: Iterable[Any],
    seeds: Sequence[int],
    *,
    policies: Sequence[str] = ("static", COMPLETE),
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


BATCHES = (64, 256)
"""Sequences that the baselines gather on an instance."""
TUNED_RATIOS = {"rlhfuse": (0.8, 0.9, 0.95, 0.98), "paper": (0.5, 0.7, 0.9, 0.95, 1.0)}


def settings_to_try(policy: str) -> dict[str, PolicySettings]:
    """What a baseline may be tuned to, by a description; of static actors there is one."""
    if policy in ("rlhfuse", "rlhfuse-resident"):
        return {
            f"τ = {ratio:g}, batch {batch}": with_ratio(policy, ratio, batch)
            for ratio in TUNED_RATIOS["rlhfuse"]
            for batch in BATCHES
        }
    if policy == "paper":
        return {f"τ = {ratio:g}": with_ratio(policy, ratio) for ratio in TUNED_RATIOS["paper"]}
    if policy == "laminar":
        return {
            f"batch {batch}": replace(
                POLICIES["laminar"],
                rule=lambda scenario, profile, samples, price, batch=batch: Repack(batch, profile.kv_tokens),
            )
            for batch in BATCHES
        }
    return {"": find_policy(policy)}


def tune(scenario: Scenario, policy: str, seeds: Sequence[int]) -> tuple[str, PolicySettings]:
    """What serves a baseline best on a scenario: the least time and cost relative to static actors, summed."""
    choices = settings_to_try(policy)
    if len(choices) == 1:
        return next(iter(choices.items()))
    found = simulate_variants(scenario, seeds, {"static": POLICIES["static"]} | choices)["policies"]
    static, *rows = found
    best = min(rows, key=lambda r: r["seconds"] / static["seconds"] + r["gpu_seconds"] / static["gpu_seconds"])
    return best["policy"], choices[best["policy"]]


def compare(scenario: Scenario, seeds: Sequence[int], tuning_seeds: Sequence[int]) -> dict[str, Any]:
    """`simulate` with every baseline as it serves the scenario best; `tuned` says how, by policy."""
    tuned = {policy: tune(scenario, policy, tuning_seeds) for policy in (*POLICIES, COMPLETE)}
    result = simulate_variants(scenario, seeds, {policy: settings for policy, (_, settings) in tuned.items()})
    return result | {"tuned": {policy: words for policy, (words, _) in tuned.items() if words}}


def with_ratio(policy: str, ratio: float, batch: int = ROOFLINE_BATCH) -> PolicySettings:
    """A system with another τ.

    Args:
        policy: `paper`, `rlhfuse` or `rlhfuse-resident`.
        batch: sequences that RLHFuse gathers on an instance.

    Raises:
        ValueError: for a system whose rule has none.
    """

    def gather(scenario: Scenario, profile: InstanceProfile, samples: int, price: float) -> Rule:
        return GlobalRatio(ratio, batch, profile.kv_tokens, samples)

    rules: dict[str, RuleMaker] = {
        "paper": lambda scenario, profile, samples, price: ActorRatio(ratio, scenario.max_batch),
        "rlhfuse": gather,
        "rlhfuse-resident": gather,
    }
    if policy not in rules:
        raise ValueError(f"policy is {policy!r}: only {', '.join(rules)} have a ratio")
    return replace(POLICIES[policy], rule=rules[policy])
