"""The differences between our algorithms and those of TRL, verl and AReaL, as in docs/research/correctness.md.

    python benchmarks/peers/correctness.py --verl verl-0.9.1-py3-none-any.whl --areal functional.py

The tests make the comparisons with TRL. verl and AReaL need not be installed: this script takes the functions that it
compares out of verl's wheel (`pip download verl --no-deps`) and out of AReaL's file
`areal/utils/functional/functional.py`, and runs them by themselves.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import math
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.shared.places import REPOSITORY
from rlhfless_functions.algorithms.aggregation import normalizer
from rlhfless_functions.algorithms.kl import kl_estimate
from rlhfless_functions.algorithms.objectives import policy_loss
from rlhfless_functions.algorithms.ratios import correction_weights, kept, sampler_ratio
from rlhfless_functions.settings import AlgorithmSettings, ImportanceSamplingSettings, RejectionSettings
from tests.algorithms import differences

Functions = dict[str, Callable[..., Any]]
SAMPLES, LONGEST = 16, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path, help="a wheel of verl; only TRL is compared with if left out")
    parser.add_argument("--areal", type=Path, help="AReaL's areal/utils/functional/functional.py; not compared without")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tests = REPOSITORY / "tests" / "algorithms"
    with contextlib.redirect_stdout(sys.stderr):
        failed = pytest.main(["-q", *map(str, sorted(tests.glob("*_against_trl.py")))])
    if failed:
        raise SystemExit("the comparisons with TRL failed")
    print(table(f"TRL {version('trl')}", differences.LARGEST))
    if arguments.verl is not None:
        print(table(f"verl {arguments.verl.name.split('-')[1]}", against_verl(arguments.verl)))
    if arguments.areal is not None:
        print(table("AReaL", against_areal(arguments.areal)))


def table(peer: str, found: dict[str, float]) -> str:
    """Markdown of the largest differences by what was compared."""
    rows = [f"| {check} | {largest:.0e} |" if largest else f"| {check} | 0 |" for check, largest in found.items()]
    return "\n".join([f"| Against {peer} | Largest difference |", "|---|---|", *rows, ""])


def against_verl(wheel: Path) -> dict[str, float]:
    """The largest differences from functions of verl's, over several random batches."""
    verl = functions_of(wheel)
    found: dict[str, float] = {}
    for seed in range(20):
        batch = random_batch(seed)
        for check, (ours, theirs) in {**objectives(verl, batch), **corrections(verl, batch)}.items():
            difference = (ours - theirs).abs().max().item()
            found[check] = max(found.get(check, 0.0), difference)
    return found


def against_areal(source: Path) -> dict[str, float]:
    """The largest differences from AReaL's decoupled loss, over several random batches."""
    names: dict[str, Any] = {"torch": torch, "dataclass": dataclass, "RejectionSamplingConfig": SimpleNamespace}
    wanted = {"RejectionSamplingResult", "_check_bounds", "apply_rejection_sampling", "ppo_actor_loss_fn"}
    define(source.read_text(), wanted, names)
    found: dict[str, float] = {}
    for seed in range(20):
        batch = random_batch(seed)
        for check, (given, theirs) in DECOUPLED.items():
            config = SimpleNamespace(metric="ratio", **{"agg": "mean", "lower": None, **theirs})
            algorithm = AlgorithmSettings(clip_high=0.28, importance_sampling=ImportanceSamplingSettings(**given))
            leaf, other = (batch.log_probs.clone().requires_grad_() for _ in range(2))
            ours = policy_loss(
                algorithm,
                log_probs=leaf,
                old_log_probs=batch.old,
                sampler_log_probs=batch.sampler,
                advantages=batch.advantages,
                mask=batch.mask,
            ).total / sum(batch.lengths)
            loss, _ = names["ppo_actor_loss_fn"](
                other, batch.old, batch.sampler, batch.advantages, 0.2, batch.mask, 0.28, rejection_sampling=config
            )
            ours.backward()
            loss.backward()
            for what, one, two in (("loss", ours.detach(), loss.detach()), ("gradient", leaf.grad, other.grad)):
                name = f"decoupled PPO, {check}, {what}"
                found[name] = max(found.get(name, 0.0), (one - two).abs().max().item())
    return found


DECOUPLED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tokens truncated": ({"high": 1.3}, {"level": "token", "action": "clamp", "upper": 1.3}),
    "tokens masked": (
        {"mode": "mask", "low": 0.7, "high": 1.3},
        {"level": "token", "action": "mask", "lower": 0.7, "upper": 1.3},
    ),
    "geometric means truncated": (
        {"level": "geometric_mean", "low": 0.95, "high": 1.05},
        {"level": "sequence", "action": "clamp", "lower": 0.95, "upper": 1.05},
    ),
    "geometric means masked": (
        {"mode": "mask", "level": "geometric_mean", "low": 0.95, "high": 1.05},
        {"level": "sequence", "action": "mask", "lower": 0.95, "upper": 1.05},
    ),
    # AReaL rejects by the product here, and weighs what stays by the geometric mean.
    "rejected by the product": (
        {
            "level": "geometric_mean",
            "high": 1e9,
            "rejection": {"level": "sequence_product", "low": 0.6, "high": 1.6},
        },
        {"level": "sequence", "agg": "sum", "action": "mask", "lower": 0.6, "upper": 1.6},
    ),
}
"""Our importance sampling, and AReaL's `rejection_sampling`, of the same loss."""


def define(source: str, wanted: set[str], names: dict[str, Any]) -> None:
    """Run the definitions that are wanted of a module, without importing it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in wanted:
            module = ast.Module([*ast.parse("from __future__ import annotations").body, node], [])
            exec(compile(module, node.name, "exec"), names)


def functions_of(wheel: Path) -> Functions:
    """Functions out of verl's modules, without importing these."""
    with zipfile.ZipFile(wheel) as archive:
        core = archive.read("verl/trainer/ppo/core_algos.py").decode()
        correction = archive.read("verl/trainer/ppo/rollout_corr_helper.py").decode()
    names: dict[str, Any] = {
        "torch": torch,
        "Any": Any,
        "Callable": Callable,
        "verl_F": SimpleNamespace(masked_mean=masked_mean, masked_sum=masked_sum),
        "ActorConfig": SimpleNamespace,
        "AlgoConfig": dict,
        "SAFETY_BOUND": 20.0,
        "SUPPORTED_ROLLOUT_RS_OPTIONS": set(VERL_REJECTION.values()),
        "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": {"token_k1"},
        "math": math,
        "compute_is_metrics": lambda **_: {},
        "compute_rs_metrics": lambda **_: {},
        "register_policy_loss": lambda _: lambda function: function,
    }
    wanted = {"agg_loss", "kl_penalty_forward", "compute_rollout_correction_weights", "_parse_rollout_is_threshold"}
    wanted |= {"compute_rollout_rejection_mask", "_parse_rollout_rs_thresholds"}
    wanted |= {f"compute_policy_loss_{name}" for name in ("vanilla", "gspo", "sapo", "geo_mean", "cispo")}
    for source in (core, correction):
        define(source, wanted, names)
    return {name: names[name] for name in wanted}


def masked_mean(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """verl's helper: the mean where the mask is True, along one axis or over all."""
    where = {} if axis is None else {"dim": axis}
    return (values * mask).sum(**where) / (mask.sum(**where) + 1e-8)


def masked_sum(values: torch.Tensor, mask: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """verl's helper: the sum where the mask is True, along one axis or over all."""
    return (values * mask).sum(**({} if axis is None else {"dim": axis}))


def random_batch(seed: int) -> SimpleNamespace:
    """Ragged responses whose policy has moved far enough for every clip to bite."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return scale * torch.randn(SAMPLES, LONGEST, generator=generator, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (SAMPLES,), generator=generator)
    old = -noise(1.0).abs()
    return SimpleNamespace(
        mask=torch.arange(LONGEST) < lengths[:, None],
        lengths=lengths.tolist(),
        old=old,
        log_probs=old + noise(0.4),
        sampler=old + noise(0.3),
        advantages=torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64).expand(SAMPLES, LONGEST),
    )


COMPARED: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "grpo, clip-higher": ({"name": "grpo", "clip_high": 0.28}, "vanilla", {"clip_ratio_high": 0.28}),
    "dual clip of 3": ({"name": "grpo", "dual_clip": 3.0}, "vanilla", {"clip_ratio_c": 3.0}),
    "gspo": (
        {"name": "gspo"},
        "gspo",
        {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4, "mode": "seq-mean-token-mean"},
    ),
    "cispo": ({"name": "cispo", "clip_low": 0.2}, "cispo", {"clip_ratio_high": 0.28}),
    "sapo": ({"name": "sapo"}, "sapo", {}),
    # verl's bounds are those of the logarithm.
    "gmpo": ({"name": "gmpo", "clip_low": 1 - 0.6703200460356393, "clip_high": 0.4918246976412703}, "geo_mean", {}),
}
"""Our settings, verl's function, and what differs from its plain configuration."""


VERL_REJECTION: dict[Any, str] = {
    "token": "token_k1",
    "sequence_product": "seq_sum_k1",
    "geometric_mean": "seq_mean_k1",
}
"""Our levels of a rejection, and verl's names of them."""


def objectives(verl: Functions, batch: SimpleNamespace) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Losses and gradients of each objective, ours and verl's."""
    pairs = {}
    for check, (settings, function, changed) in COMPARED.items():
        clip = 0.4 if function == "geo_mean" else 0.2
        config = SimpleNamespace(
            **{"clip_ratio": clip, "clip_ratio_low": clip, "clip_ratio_high": clip, "clip_ratio_c": 1e9, **changed},
            tau_pos=1.0,
            tau_neg=1.05,
            global_batch_info={},
            get=lambda name, default, changed=changed: changed.get(name, 1e9 if name == "clip_ratio_c" else default),
        )
        algorithm = AlgorithmSettings(**settings)
        divisor = normalizer(batch.lengths, algorithm.resolved().aggregation, LONGEST)
        leaf, other = (batch.log_probs.clone().requires_grad_() for _ in range(2))
        ours = policy_loss(
            algorithm, log_probs=leaf, old_log_probs=batch.old, advantages=batch.advantages, mask=batch.mask
        )
        (ours.total / divisor).backward()
        theirs, _ = verl[f"compute_policy_loss_{function}"](
            batch.old, other, batch.advantages, batch.mask.double(), changed.get("mode", "token-mean"), config
        )
        theirs.backward()
        pairs[f"{check}, loss"] = (ours.total.detach() / divisor, theirs.detach())
        pairs[f"{check}, gradient"] = (leaf.grad, other.grad)
    return pairs


def corrections(verl: Functions, batch: SimpleNamespace) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Importance weights and KL estimates, ours and verl's."""
    pairs = {}
    bounds: dict[str, tuple[dict[str, Any], float | str]] = {
        "truncated": ({"high": 1.5}, 1.5),
        "masked (IcePop)": ({"mode": "mask", "low": 0.7, "high": 1.4}, "0.7_1.4"),
    }
    for level, theirs_name in (("token", "token"), ("sequence_product", "sequence")):
        for check, (given, threshold) in bounds.items():
            settings = ImportanceSamplingSettings(level=level, **given)
            ratio = sampler_ratio(batch.old, batch.sampler, batch.mask, settings.level)
            ours = correction_weights(ratio, settings).expand(batch.mask.shape)
            weights, _ = verl["compute_rollout_correction_weights"](
                batch.old - batch.sampler, batch.mask.double(), theirs_name, threshold
            )
            pairs[f"importance weights, {level}, {check}"] = (ours[batch.mask], weights[batch.mask])
    for level, theirs_name in VERL_REJECTION.items():
        # verl bounds the inverse of our ratio.
        rejection = RejectionSettings(level=level, low=1 / 1.2, high=1 / 0.9)
        stays = kept(sampler_ratio(batch.old, batch.sampler, batch.mask, level), rejection)
        mask, _ = verl["compute_rollout_rejection_mask"](
            batch.old - batch.sampler, batch.mask.double(), theirs_name, "0.9_1.2"
        )
        pairs[f"what is kept, {level}"] = (stays.expand(batch.mask.shape).double()[batch.mask], mask[batch.mask])
    for estimator in ("k1", "k2", "k3"):
        ours = kl_estimate(batch.log_probs, batch.sampler, estimator)
        pairs[f"KL estimate {estimator}"] = (
            ours,
            verl["kl_penalty_forward"](batch.log_probs, batch.sampler, estimator),
        )
    return pairs


if __name__ == "__main__":
    main()
