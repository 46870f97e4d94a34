"""RLHFJobs as a user of kubectl meets them, and the pods that they hold."""

import copy
import itertools
import json
import subprocess
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from harness.images import ROOT
from harness.kubectl import Kubectl, KubectlError
from harness.storage import Storage

QUICKSTART = ROOT / "examples" / "quickstart" / "grpo.yaml"
STEPS = 3
"""Of a short job."""
KEPT: dict[str, Any] = {"generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "5m"}}
"""Pods stay from step to step. A test then does not wait for new ones to start."""
ONE_GPU: dict[str, Any] = {
    "pods": {"resources": {"limits": {"nvidia.com/gpu": "1"}}},
    "generation": {"instances": {"min": 1, "max": 1}},
}
"""Each stage has one pod, which asks for a GPU."""


class Jobs:
    """The jobs of a namespace."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.kubectl = kubectl

    def apply_file(self, file: Path) -> None:
        """`kubectl apply -f FILE`."""
        self.kubectl("apply", "-f", str(file))

    def apply(self, job: dict[str, Any]) -> None:
        """`kubectl apply` of a document."""
        self.kubectl("apply", "-f", "-", given=json.dumps(job))

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        """Change fields of the spec."""
        self.kubectl("patch", "rlhfjob", name, "--type=merge", "--patch", json.dumps({"spec": spec}))

    def delete(self, name: str, *, wait: bool = True) -> None:
        """`kubectl delete`."""
        self.kubectl("delete", "rlhfjob", name, "--ignore-not-found", f"--wait={str(wait).lower()}")

    def status(self, name: str) -> dict[str, Any]:
        """The status; empty before there is one."""
        return self.kubectl.get("rlhfjob", name).get("status", {})

    def wait(self, name: str, what: str, done: Callable[[dict[str, Any]], Any], seconds: float) -> dict[str, Any]:
        """Wait for a status; a job that has failed is an error at once."""

        def look() -> dict[str, Any] | None:
            status = self.status(name)
            if done(status):
                return status
            assert status.get("phase") != "Failed", f"{name} failed: {status.get('message')}"
            return None

        return self.kubectl.wait_until(f"{name}: {what}", look, seconds)

    def wait_succeeded(self, name: str, seconds: float) -> dict[str, Any]:
        """Wait until all of its steps are done. One kubectl watches, since one for each look takes CPU from the job."""

        def look() -> dict[str, Any] | None:
            with suppress(KubectlError):
                self.kubectl("wait", f"rlhfjob/{name}", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=10s")
            status = self.status(name)
            assert status.get("phase") != "Failed", f"{name} failed: {status.get('message')}"
            return status if status.get("phase") == "Succeeded" else None

        return self.kubectl.wait_until(f"{name}: succeeded", look, seconds)

    def objects(self, name: str) -> list[str]:
        """Everything of a job's that is in the namespace."""
        kinds = "services.serving.knative.dev,revisions.serving.knative.dev,pods,secrets,networkpolicies"
        found = self.kubectl("get", kinds, f"--selector=rlhfless.io/job={name}", "--output=name")
        return found.split()


def quickstart(name: str, **spec: Any) -> dict[str, Any]:
    """The quickstart's document under another name, with parts of its spec replaced; None removes one."""
    job: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    job["metadata"]["name"] = name
    for field, value in copy.deepcopy(spec).items():
        if value is None:
            job["spec"].pop(field, None)
        elif isinstance(value, dict) and isinstance(job["spec"].get(field), dict):
            job["spec"][field] |= value
        else:
            job["spec"][field] = value
    return job


def short(name: str, *, steps: int = STEPS, **spec: Any) -> dict[str, Any]:
    """A few steps of the quickstart on fewer prompts, without its evaluations."""
    batch = {"promptsPerStep": 8, "samplesPerPrompt": 8, "minibatchSamples": 32, "microbatchTokens": 16384}
    return quickstart(name, **{"steps": steps, "evaluation": None, "batch": batch, **spec})


def in_stage(stage: str, storage: Storage, root: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a status is of a stage of the second step or a later one; preparation is under way with generation.

    Args:
        root: the job's folder.
    """
    # A stage may take less than a look at the status, so it is waited for where it is written down.
    written = {
        "generation": f"{root}/rollouts/step-000002",
        "preparation": f"{root}/batches/step-000002",
        "learning": f"{root}/results/step-000002/batch.json",
    }[stage]

    def is_there(status: dict[str, Any]) -> bool:
        if stage == "generation" and status.get("step", 0) >= 1 and status.get("stage") == stage:
            return True
        looks = f"ls {written} 2>/dev/null | grep -q . && echo there && exit; sleep 0.1"
        return bool(storage.run("sh", "-c", f"for each in $(seq 100); do {looks}; done").strip())

    return is_there


def reach(stage: str, jobs: Jobs, storage: Storage, job: dict[str, Any]) -> str:
    """Apply a job, and wait until it is in a stage of its second step or of a later one; the job's folder."""
    name = job["metadata"]["name"]
    root = storage.job(name)
    jobs.apply(job)
    jobs.wait(name, f"in {stage} of the second step", in_stage(stage, storage, root), 400)
    return root


def weights_of(storage: Storage, root: str) -> str:
    """Checksum of the model that a job has exported."""
    return storage.run("sha256sum", f"{root}/model/model.safetensors").split()[0]


def steps_of(storage: Storage, root: str) -> list[int]:
    """The steps that its records tell of, in their order."""
    return [json.loads(line)["step"] for line in storage.read(f"{root}/metrics.jsonl").splitlines()]


def run_undisturbed(jobs: Jobs, storage: Storage, job: dict[str, Any]) -> str:
    """Run a job to which nothing happens; the checksum of its weights."""
    name = job["metadata"]["name"]
    jobs.apply(job)
    jobs.wait_succeeded(name, 900)
    jobs.delete(name)
    return weights_of(storage, storage.job(name))


def finish_as(undisturbed: str, jobs: Jobs, storage: Storage, name: str, root: str, *, all_steps: int = STEPS) -> None:
    """Wait for a short job to succeed, and delete it: no step may be lost or doubled.

    Args:
        undisturbed: checksum of the weights that it has to come to.
        root: the job's folder.
        all_steps: of the job.
    """
    assert jobs.wait_succeeded(name, 900)["step"] == all_steps
    weights, steps = weights_of(storage, root), steps_of(storage, root)
    assert weights == undisturbed, f"{name} came to other weights: {weights} instead of {undisturbed}"
    assert steps == list(range(1, all_steps + 1)), f"{name} lost or doubled a step: {steps}"
    jobs.delete(name)


class PodCounts:
    """Watches how many pods of a job each stage has, while the context lasts."""

    def __init__(self, kubectl: Kubectl, job: str) -> None:
        self._command = [
            *("kubectl", "-n", kubectl.namespace, "get", "pods", f"--selector=rlhfless.io/job={job}"),
            *("--watch", "--output-watch-events", "--output=json"),
        ]
        self.counts: dict[str, list[int]] = defaultdict(lambda: [0])
        """Numbers of pods that are not terminating, by stage, one for each change."""
        self._stages: dict[str, str] = {}

    def __enter__(self) -> "PodCounts":
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._thread.join()
        self._process.wait()

    def rises(self, stage: str) -> int:
        """How often the stage went from no pods to some."""
        counts = self.counts[stage]
        return sum(before == 0 and after > 0 for before, after in itertools.pairwise(counts))

    def most(self, stage: str) -> int:
        """The most pods that it had at a time."""
        return max(self.counts[stage])

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            self._note(event["type"], event["object"])

    def _note(self, kind: str, pod: dict[str, Any]) -> None:
        name, stage = pod["metadata"]["name"], pod["metadata"]["labels"].get("rlhfless.io/stage", "?")
        if kind == "DELETED" or "deletionTimestamp" in pod["metadata"]:
            self._stages.pop(name, None)
        else:
            self._stages[name] = stage
        number = sum(each == stage for each in self._stages.values())
        if self.counts[stage][-1] != number:
            self.counts[stage].append(number)
