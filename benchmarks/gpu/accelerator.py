"""The device that a benchmark runs on: its clock, its memory, and the arithmetic that it can reach."""

import os
import time
from collections.abc import Callable

import psutil
import torch

from rlhfless_operator.planner.latency.roofline import GPUS


def device() -> torch.device:
    """The first GPU, or the CPU."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def device_name() -> str:
    """As its maker calls it."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def model_dtype() -> str:
    """Number format of a job's model: few CPUs are fast in bfloat16."""
    return "bfloat16" if torch.cuda.is_available() else "float32"


def now() -> float:
    """Seconds, after everything that the device was given is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def timed(action: Callable[[], object]) -> float:
    """Seconds that an action takes, with what it has the device do."""
    began = now()
    action()
    return now() - began


def used_bytes() -> int:
    """Memory of the device that is in use, this process's caches included; on a CPU what this process has."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return psutil.Process(os.getpid()).memory_info().rss


def data_sheet_flops(name: str) -> float | None:
    """Dense bfloat16 operations per second of a GPU by the driver's name for it; None for what is not known, such as
    the slower cards of a GPU whose SXM module is."""
    words = name.upper().replace("-", " ").split()
    known = [gpu.flops for gpu in GPUS.values() if gpu.name in words]
    return known[0] if known and not {"PCIE", "NVL"} & set(words) else None


def matmul_flops(dtype: torch.dtype, *, seconds: float = 1.0) -> float:
    """Operations per second of the fastest of several products of square matrices."""
    size = 8192 if torch.cuda.is_available() else 1024
    left, right = (torch.randn(size, size, device=device()).to(dtype) for _ in range(2))
    best, ends = float("inf"), now() + seconds
    torch.matmul(left, right)
    while (began := now()) < ends:
        torch.matmul(left, right)
        best = min(best, now() - began)
    return 2 * size**3 / best
