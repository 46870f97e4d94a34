"""The quickstart's document: run on this machine, and applied to the cluster."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.jobs import QUICKSTART, Jobs, PodCounts, quickstart
from harness.kubectl import Kubectl
from harness.storage import folder_of

NAME = "quickstart-grpo"


@dataclass(frozen=True)
class Applied:
    """The quickstart on the cluster, once it has ended."""

    status: dict[str, Any]
    pods: PodCounts
    """What was seen of its pods."""
    steps: int
    root: str
    """Its folder."""


def run_here(folder: Path, steps: int | None) -> Path:
    """The folder of the job, run without a cluster, a thread an instance as in pods.

    Args:
        folder: where its artifacts are.
        steps: instead of the document's.
    """
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(QUICKSTART), "--threads", "1"]
    command += ["--set", f"spec.steps={steps}"] if steps is not None else []
    subprocess.run([*command, "--artifacts", str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder / NAME


def apply(kubectl: Kubectl, steps: int | None) -> Applied:
    """Apply it as it is, or with other steps, and wait until it has succeeded and its pods are gone."""
    jobs = Jobs(kubectl)
    with PodCounts(kubectl, NAME) as pods:
        if steps is None:
            jobs.apply_file(QUICKSTART)
        else:
            jobs.apply(quickstart(NAME, steps=steps))
        status = jobs.wait_succeeded(NAME, 3000)
        kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": NAME})
    return Applied(status, pods, steps or quickstart(NAME)["spec"]["steps"], folder_of(kubectl.namespace, NAME))
