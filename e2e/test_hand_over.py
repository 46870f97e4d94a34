"""How long a GPU takes to change hands on a cluster, with a model of 126 MB: printed, and kept in a file."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster.hand_overs import hand_overs, summary
from benchmarks.shared.machine import describe_machine
from benchmarks.shared.random_models import QWEN3_126_MB
from harness.jobs import ONE_GPU, QUICKSTART, Jobs, quickstart
from harness.kubectl import Kubectl, KubectlError, is_ready
from harness.storage import Storage
from rlhfless_functions.api import STAGES
from tests.prerequisites import needs_claims

pytestmark = needs_claims("no GPU is used in turns")

NAME = "hand-over"
STEPS = 40
BATCH = {"promptsPerStep": 4, "samplesPerPrompt": 4, "minibatchSamples": 16, "microbatchTokens": 4096}
"""Little work: what counts is between the stages."""
RESPONSE_TOKENS = 16
COMMAND = "RLHFLESS_E2E_HAND_OVER_FILE=benchmarks/cluster/results/hand_over.json make e2e E2E=e2e/test_hand_over.py"


@pytest.fixture
def model(storage: Storage, tmp_path: Path) -> str:
    """A model of 126 MB with random weights and the quickstart's tokenizer, where the functions find it."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    folder = tmp_path / "model"
    Qwen3ForCausalLM(Qwen3Config(**QWEN3_126_MB)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART.parent / "model" / name, folder)
    storage.put(folder, f"/files/{NAME}")
    return f"./{NAME}"


def test_change_of_hands(one_slot: Jobs, kubectl: Kubectl, storage: Storage, model: str, tmp_path: Path) -> None:
    job = quickstart(
        NAME,
        steps=STEPS,
        model={"source": model},
        batch=BATCH,
        sampling={"maxResponseTokens": RESPONSE_TOKENS},
        evaluation=None,
        checkpoints={"everySteps": STEPS},
        **ONE_GPU,
    )
    one_slot.apply(job)
    pods = kubectl.wait_until("a pod of each stage", lambda: ready_pods(kubectl), 300)
    with following_logs(kubectl, pods, tmp_path) as logs:
        wait_quietly(one_slot)
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines() if line.startswith("{")]
    found = hand_overs(lines)
    ledger = [json.loads(line) for line in storage.read(f"{storage.job(NAME)}/ledger.jsonl").splitlines()]
    one_slot.delete(NAME)
    # In the first step each pod imports the model's code, and reads what no cache has yet.
    result = {
        "steps": STEPS,
        "from_the_second_step_on": summary([each for each in found if each.step > 1]),
        "first_step": [round(each.seconds, 3) for each in found if each.step == 1],
        "ledger_switching_seconds": switching(ledger),
    }
    print(json.dumps(result))
    if file := os.environ.get("RLHFLESS_E2E_HAND_OVER_FILE"):
        head = {"command": COMMAND, **describe_machine(("torch", "transformers")), "kubernetes": server(kubectl)}
        Path(file).write_text(json.dumps({**head, **result}, indent=2) + "\n")
    # Three a step: to preparation, to learning, and to the next step's generation.
    assert len([each for each in found if each.step > 1]) >= 3 * (STEPS - 1)


def ready_pods(kubectl: Kubectl) -> list[str] | None:
    """Names of the job's pods once each stage has one."""
    pods = [pod for pod in kubectl.list("pods", **{"rlhfless.io__job": NAME}) if is_ready(pod)]
    stages = {pod["metadata"]["labels"]["rlhfless.io/stage"] for pod in pods}
    return [pod["metadata"]["name"] for pod in pods] if stages == set(STAGES) else None


def wait_quietly(jobs: Jobs) -> None:
    """Wait until the job has succeeded, by looks that wait: many looks would take the processor from the pods."""
    until = time.monotonic() + 900 * jobs.kubectl.patience
    while time.monotonic() < until:
        with contextlib.suppress(KubectlError):
            jobs.kubectl("wait", f"rlhfjob/{NAME}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=20s")
            return
        assert (status := jobs.status(NAME)).get("phase") != "Failed", status.get("message")
    raise TimeoutError(f"{NAME} is still at work")


@contextlib.contextmanager
def following_logs(kubectl: Kubectl, pods: Sequence[str], folder: Path) -> Iterator[list[Path]]:
    """Files that the pods' logs are written to, from their beginning."""
    files, processes = [folder / f"{pod}.log" for pod in pods], []
    for pod, file in zip(pods, files, strict=True):
        command = ["kubectl", "-n", kubectl.namespace, "logs", pod, "--container=function", "--follow"]
        with file.open("w") as output:
            processes.append(subprocess.Popen(command, stdout=output))
    try:
        yield files
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def switching(ledger: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What the ledger has of it: putting to sleep and waking, by stage."""
    return {
        stage: round(sum(e["end"] - e["start"] for e in ledger if e["stage"] == stage and e["state"] == "switching"), 3)
        for stage in STAGES
    }


def server(kubectl: Kubectl) -> str:
    """Version of the API server."""
    with contextlib.suppress(KubectlError):
        return str(json.loads(kubectl("version", "--output=json"))["serverVersion"]["gitVersion"])
    return ""
