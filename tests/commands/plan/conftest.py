"""A job to forecast, on a machine that has nothing to say of its own."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_is_near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Neither GPUs, nor pools, nor a cluster, nor models: where a test's nvidia-smi may be put."""
    for variable in ("RLHFLESS_POOLS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    place = tmp_path / "bin"
    place.mkdir()
    monkeypatch.setenv("PATH", str(place))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


@pytest.fixture
def job(tiny_job: Callable[..., Path]) -> Path:
    """A GRPO job of 32 prompts of 8 samples on up to eight instances."""
    return tiny_job(
        model={"source": "Qwen/Qwen2.5-7B-Instruct", "dtype": "bfloat16", "lora": {"rank": 16}},
        learning={"gradientCheckpointing": True},
        sampling={"maxPromptTokens": 1024, "maxResponseTokens": 2048},
        batch={"promptsPerStep": 32, "samplesPerPrompt": 8, "minibatchSamples": 256},
        generation={"instances": {"min": 1, "max": 8}},
        prices={"instanceHour": "4.00"},
        steps=100,
    )
