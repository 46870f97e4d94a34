"""The quickstart's document as it is: run on this machine, and applied to the cluster."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.jobs import QUICKSTART, Jobs, PodCounts
from harness.kubectl import Kubectl

NAME = "quickstart-grpo"


@dataclass(frozen=True)
class Applied:
    """The quickstart on the cluster, once it has ended."""

    status: dict[str, Any]
    pods: PodCounts
    """What was seen of its pods."""
    root: str = f"/artifacts/runs/{NAME}"
    """Its folder."""


def run_here(folder: Path) -> Path:
    """The folder of the job, run without a cluster, a thread an instance as in pods."""
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(QUICKSTART), "--threads", "1"]
    subprocess.run([*command, "--artifacts", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / NAME


def apply(kubectl: Kubectl) -> Applied:
    """Apply it, and wait until it has succeeded and its pods are gone."""
    jobs = Jobs(kubectl)
    with PodCounts(kubectl, NAME) as pods:
        jobs.apply_file(QUICKSTART)
        status = jobs.wait_succeeded(NAME, 3000)
        kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": NAME})
    return Applied(status, pods)
