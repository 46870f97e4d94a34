"""vLLM's sleep on a GPU that it shares with other processes: the code of its worker, on memory counted here."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import rlhfless_functions.generation.engines.vllm.extension  # noqa: F401 - as vLLM's workers do

GIB = 2**30
SLEEP = "rlhfless_functions.generation.engines.vllm.sleep"


def put_to_sleep(monkeypatch: pytest.MonkeyPatch, free: list[int], **worker: Any) -> list[int]:
    """Have vLLM's worker sleep while the GPU's free memory goes from one to the other; return the levels asked for."""
    import vllm.v1.worker.cpu_worker  # noqa: F401 - vLLM on a CPU asks for it first
    from vllm.v1.worker.gpu_worker import Worker

    asked: list[int] = []
    readings = iter([*free, free[-1]])
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(readings) * GIB, 80 * GIB))
    settings = SimpleNamespace(enable_nccl_comm_suspend=False)
    stand_in = SimpleNamespace(
        sleep_mode_backend=SimpleNamespace(suspend=asked.append),
        vllm_config=SimpleNamespace(model_config=settings),
        model_config=settings,
        parallel_config=SimpleNamespace(world_size=1),
    )
    Worker.sleep(SimpleNamespace(**vars(stand_in) | worker), 1)
    return asked


def test_memory_that_another_process_takes_meanwhile_does_not_end_the_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, SLEEP):
        assert put_to_sleep(monkeypatch, [30, 20]) == [1]
    assert "another process took more of the same GPU" in caplog.text
    assert "60.00 GiB of its GPU are still in use" in caplog.text


def test_what_stays_in_use_is_said_with_the_argument_that_releases_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, SLEEP):
        put_to_sleep(monkeypatch, [30, 70])
        assert "10.00 GiB of its GPU are still in use" in caplog.text
        assert "took more" not in caplog.text and "NCCL" not in caplog.text
        put_to_sleep(monkeypatch, [30, 70], parallel_config=SimpleNamespace(world_size=2))
    assert "NCCL's buffers, which generation.vllm.extraArgs: enable_nccl_comm_suspend releases" in caplog.text


def test_another_failure_of_vllm_s_sleep_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(level: int) -> None:
        raise AssertionError("the pool is in use")

    with pytest.raises(AssertionError, match="the pool is in use"):
        put_to_sleep(monkeypatch, [30, 70], sleep_mode_backend=SimpleNamespace(suspend=fails))
