"""The machine that a benchmark runs on: hardware, load and versions."""

import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil


def describe_machine(packages: Iterable[str]) -> dict[str, Any]:
    """Hardware, load and versions.

    Args:
        packages: whose versions count; one that is not installed is left out.
    """
    return {
        "machine": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpu_query("name,memory.total,driver_version"),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "versions": installed_versions(packages),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def gpu_query(fields: str) -> list[str]:
    """What `nvidia-smi` says of each GPU, a line each without units; nothing where there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
