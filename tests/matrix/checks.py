"""What must hold for every job that has trained, with any options."""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file

from rlhfless_operator.job.reading.timing import depends_on_timing
from rlhfless_operator.job.spec import RLHFJobSpec
from tests.matrix.setting import Setting
from tests.training.whole_jobs import final_weights, folder_of, half_written, records_of, run_job


def check_job(setting: Setting, file: Path) -> None:
    """Run a job, and see that it has learnt something, in numbers that can be."""
    spec = setting.spec_of(file)
    print(json.dumps(spec))
    summary = run_job(file)
    assert summary["phase"] == "Succeeded"
    assert half_written(folder_of(file)) == []
    records = [record for record in records_of(file) if record["step"]]
    assert len(records) == summary["steps"] >= 2
    for record in records:
        metrics = record["metrics"]
        assert {name: value for name, value in metrics.items() if not math.isfinite(value)} == {}
        assert metrics["batch/samples"] == 3 * spec["batch"]["samplesPerPrompt"]
        # Dropout and stale weights are a mismatch that is meant.
        meant = spec["model"].get("lora", {}).get("dropout") or "async" in spec
        assert meant or metrics.get("mismatch/mean_exp_abs", 1.0) < 1.05
        asynchronous = spec.get("async", {})
        bounded = asynchronous.get("tooStale") != "downweight"
        assert not bounded or metrics.get("generation/staleness", 0.0) <= asynchronous.get("maxStaleness", 1)
        if spec.get("algorithm", {}).get("proximalPolicy") != "sampler":
            _check_ratios(metrics)
    learnt = any(record["metrics"].get("policy/gradient_norm", 0.0) > 0 for record in records)
    assert learnt or not any(_teaches(record["metrics"]) for record in records)
    assert _has_moved(setting, final_weights(file)) == learnt


def _teaches(metrics: dict[str, float]) -> bool:
    """Whether there is anything to learn. Where all samples but one are masked, it has an advantage of 0 once the
    batch's mean is taken away."""
    return metrics["batch/teaching_groups"] > 0 and metrics["batch/samples"] - metrics["batch/masked_samples"] > 1


def is_reproducible(spec: RLHFJobSpec) -> bool:
    """Whether a second run has the same bits: in bfloat16 a token may depend on which others are decoded with it, and
    `depends_on_timing` knows the rest."""
    return spec.model.dtype == "float32" and not spec.learning.compile and not depends_on_timing(spec)


def _check_ratios(metrics: dict[str, float]) -> None:
    """A step begins on-policy; a few small updates later it is still near."""
    if "policy/ratio_mean" not in metrics:
        return  # While only the critic learns, or where no sample is in the loss.
    if metrics["policy/updates"] == 1:
        assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1
    # Among the ratios of all updates are those of the first, which are 1.
    assert metrics["policy/ratio_min"] <= 1 + 1e-6
    assert metrics["policy/ratio_max"] >= 1 - 1e-6
    assert abs(math.log(metrics["policy/ratio_mean"])) < 1


def _has_moved(setting: Setting, weights: dict[str, torch.Tensor]) -> bool:
    """Whether the weights are others than the job began with; an adapter's second matrices begin at zero."""
    if adapted := [tensor for name, tensor in weights.items() if "lora_B" in name]:
        return any(bool(tensor.any()) for tensor in adapted)
    given = load_file(setting.model / "model.safetensors")
    return any(not torch.equal(given[name].to(tensor.dtype), tensor) for name, tensor in weights.items())
