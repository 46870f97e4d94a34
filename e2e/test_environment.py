"""Jobs whose samples act: pods of an environment that come with sessions and go, actors that are let go, and kills."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.audit import Replayer, prompts_of
from harness.chart import Chart
from harness.images import ROOT
from harness.jobs import Jobs, PodCounts, finish_as, steps_of
from harness.kubectl import Kubectl, is_ready
from harness.storage import Storage

EXAMPLE = ROOT / "examples" / "tools"
SERVERS = ROOT / "tests" / "environments"
STEPS = 2
SESSIONS = 4
"""Of a pod."""
SAMPLES = 16
"""Of a step, in one actor: all of them act at a time."""
ACTION_SECONDS = 5
"""A sample acts for longer than Knative takes to see that it needs a pod."""
LONG = {"epochs": 200}
"""A learner works for longer with it than Knative takes to remove the pods that nobody needs."""

AWAY_SECONDS = 45
"""An answer takes longer than it does to let an actor go and to have one again."""
SLOW = f"""
import time


class Slow(Counter):
    def add(self, amount: int) -> str:
        \"\"\"Add to the counter.

        Args:
            amount: the number to add.
        \"\"\"
        time.sleep({AWAY_SECONDS})
        return super().add(amount)

    def take(self, amount: int) -> str:
        \"\"\"Take from the counter.

        Args:
            amount: the number to take.
        \"\"\"
        time.sleep({AWAY_SECONDS})
        return super().take(amount)
"""


def openenv(servers: str) -> dict[str, Any]:
    """An environment of OpenEnv, whose server needs nothing but the functions' Python.

    Args:
        servers: folder with the server's program.
    """
    command = ["python", f"{servers}/openenv_server.py", str(ACTION_SECONDS)]
    return {"openenv": {"command": command, "sessions": SESSIONS}}


def own_class(example: str) -> dict[str, Any]:
    """The example's class, on CPUs of its own.

    Args:
        example: folder with its file.
    """
    return {"python": {"file": f"{example}/counter.py", "class": "Counter"}, "served": {"sessions": SESSIONS}}


def document(name: str, example: str, environment: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """A short job.

    Args:
        example: folder with the model and the data.
    """
    job: dict[str, Any] = yaml.safe_load((EXAMPLE / "grpo.yaml").read_text())
    job["metadata"]["name"] = name
    job["spec"] |= {
        "model": job["spec"]["model"] | {"source": f"{example}/model"},
        "data": {"source": f"{example}/train.jsonl"},
        "environment": {
            **environment,
            "replayable": True,
            "letGo": "never",
            # The program is on a volume of the test's own.
            "pods": {"volumes": [{"claim": "files", "mountPath": "/files", "readOnly": True}]},
        },
        "batch": {"promptsPerStep": 4, "samplesPerPrompt": 4, "minibatchSamples": SAMPLES, "microbatchTokens": 16384},
        "generation": {"instances": {"min": 1, "max": 1}},
        # Its weights are compared with those of another run.
        "learning": {"overlap": "never"},
        "prices": {"instanceHour": "1", "stages": {"environment": "36"}},
        "steps": STEPS,
        **spec,
    }
    del job["spec"]["evaluation"]
    return job


@pytest.fixture(scope="module")
def jobs(chart: Chart, kubectl: Kubectl, storage: Storage) -> Iterator[Jobs]:
    storage.put(SERVERS, "/files/servers")
    storage.put(EXAMPLE, "/files/tools")
    yield Jobs(kubectl)


def laptop_weights(job: dict[str, Any], folder: Path) -> str:
    """Checksum of the weights of a job, run on this machine."""
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "rlhfless_operator", "run", str(file), "--threads", "1"]
    subprocess.run([*command, "--artifacts", str(folder)], check=True, stdout=subprocess.DEVNULL)
    name = job["metadata"]["name"]
    return hashlib.sha256((folder / name / "model" / "model.safetensors").read_bytes()).hexdigest()


def test_servers_come_with_sessions_and_go_while_the_learner_works(jobs: Jobs, storage: Storage) -> None:
    with PodCounts(jobs.kubectl, "served") as pods:
        jobs.apply(document("served", "tools", openenv("/files/servers"), algorithm=LONG))
        jobs.wait("served", "a rollout is done", lambda status: status.get("stage") == "learning", 400)
        jobs.wait_succeeded("served", 900)
        jobs.kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": "served"})
    counts = pods.counts["environment"]
    print({stage: pods.counts[stage] for stage in pods.counts})
    # How many there are when the first samples are done depends on how long pods take to start here.
    assert 1 < pods.most("environment") <= SAMPLES / SESSIONS
    assert counts[0] == counts[-1] == 0
    assert pods.rises("environment") >= STEPS
    accounts = [
        json.loads(line)["ledger"]["environment"]
        for line in storage.read(f"{storage.job('served')}/metrics.jsonl").splitlines()
    ]
    assert all(account["busy"] > 0 and float(account["cost"]) > 0 for account in accounts)
    assert jobs.status("served")["phase"] == "Succeeded"
    jobs.delete("served")
    jobs.kubectl.wait_until("nothing of served is left", lambda: not jobs.objects("served"), 120)


def test_the_weights_are_those_of_the_laptop_after_a_kill_in_mid_episode(
    jobs: Jobs, storage: Storage, tmp_path: Path
) -> None:
    # One process has all sessions there.
    environment = openenv(str(SERVERS))
    environment["openenv"]["sessions"] = SAMPLES
    expected = laptop_weights(document("acting", str(EXAMPLE), environment), tmp_path)
    jobs.apply(document("acting", "tools", openenv("/files/servers")))
    labels = {"rlhfless.io__job": "acting", "rlhfless.io__stage": "environment"}

    def acts() -> str | None:
        ready = ready_pods(jobs, labels)
        return ready[0] if ready and jobs.status("acting").get("stage") == "generation" else None

    victim = jobs.kubectl.wait_until("samples act", acts, 300)
    jobs.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
    assert jobs.status("acting").get("stage") == "generation"
    finish_as(expected, jobs, storage, "acting", storage.job("acting"), all_steps=STEPS)


def test_a_class_of_ones_own_acts_in_pods_of_its_own_as_beside_the_engine(
    jobs: Jobs, storage: Storage, tmp_path: Path
) -> None:
    beside = document("own", str(EXAMPLE), own_class(str(EXAMPLE)))
    beside["spec"]["environment"] |= {"served": None, "pods": {}}
    del beside["spec"]["prices"]["stages"]
    expected = laptop_weights(beside, tmp_path)
    with PodCounts(jobs.kubectl, "own") as pods:
        jobs.apply(document("own", "tools", own_class("/files/tools")))
        jobs.wait_succeeded("own", 900)
        jobs.kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": "own"})
    assert pods.rises("environment") >= 1
    finish_as(expected, jobs, storage, "own", storage.job("own"), all_steps=STEPS)


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "killed"])
def test_actors_are_let_go_while_environments_work(jobs: Jobs, storage: Storage, tmp_path: Path, killed: bool) -> None:
    place = tmp_path / "slow"
    shutil.copytree(EXAMPLE, place)
    file = place / "counter.py"
    file.write_text(file.read_text() + SLOW)
    storage.put(place, "/files/slow")

    def slow(name: str, folder: str, let_go: str) -> dict[str, Any]:
        job = document(name, folder, {"python": {"file": f"{folder}/counter.py", "class": "Slow"}, "maxTurns": 2})
        job["spec"]["environment"] |= {"letGo": let_go, "pods": {}, "toolSeconds": "5m"}
        return job

    name = "away-killed" if killed else "away"
    beside = slow(name, str(place), "never")
    del beside["spec"]["prices"]["stages"]
    expected = laptop_weights(beside, tmp_path)
    job = slow(name, "slow", "auto")
    with PodCounts(jobs.kubectl, name) as pods:
        jobs.apply(job)
        if killed:
            keeper = {"rlhfless.io__job": name, "rlhfless.io__stage": "shelter"}
            jobs.kubectl.wait_until("actors are let go", lambda: _alone(jobs, name), 600)
            (victim,) = [pod["metadata"]["name"] for pod in jobs.kubectl.list("pods", **keeper)]
            jobs.kubectl("delete", "pod", victim, "--grace-period=0", "--force")
        jobs.wait_succeeded(name, 900)
        jobs.kubectl.wait_for_pods(0, 120, **{"rlhfless.io__job": name})
    print({stage: pods.counts[stage] for stage in pods.counts})
    # The first rollout shows how long the environments take. In the second one the actor comes after each answer.
    assert pods.rises("generation") > STEPS
    assert pods.most("shelter") == 1 and pods.counts["shelter"][-1] == 0
    last = json.loads(storage.read(f"{storage.job(name)}/metrics.jsonl").splitlines()[-1])
    print(last["metrics"]["generation/let_go"], last["ledger"])
    assert last["metrics"]["generation/let_go"] > 0.3
    assert last["ledger"]["environment"]["busy"] > AWAY_SECONDS
    finish_as(expected, jobs, storage, name, storage.job(name), all_steps=STEPS)


def _alone(jobs: Jobs, job: str) -> bool:
    """Whether what keeps a job's episodes is all that the job has."""
    pods = jobs.kubectl.list("pods", **{"rlhfless.io__job": job})
    there = {pod["metadata"]["labels"]["rlhfless.io/stage"] for pod in pods if is_ready(pod)}
    return there == {"shelter"}


def test_rollouts_go_ahead_while_others_act_and_kills_lose_no_group(
    jobs: Jobs, storage: Storage, replayer: Replayer
) -> None:
    name, steps = "ahead-acting", 4
    job = document(name, "tools", openenv("/files/servers"), steps=steps)
    job["spec"] |= {"async": {"maxStaleness": 1}, "checkpoints": {"keepRollouts": True, "everySteps": 2}}
    jobs.apply(job)
    root = storage.job(name)
    for done, victim in enumerate(("environment", "generation"), start=1):
        jobs.wait(name, f"step {done} is done", lambda status, done=done: status.get("step", 0) >= done, 600)
        labels = {"rlhfless.io__job": name, "rlhfless.io__stage": victim}
        pods = jobs.kubectl.wait_until(f"a pod of {victim}", lambda labels=labels: ready_pods(jobs, labels), 300)
        jobs.kubectl("delete", "pod", pods[0], "--grace-period=0", "--force")
    jobs.wait_succeeded(name, 1200)
    assert steps_of(storage, root) == list(range(1, steps + 1))
    prompts_of(storage, root, steps=steps, staleness=1, size=(4, 4))
    assert "the same weights bit for bit" in replayer.replay(root)
    jobs.delete(name)


def ready_pods(jobs: Jobs, labels: dict[str, str]) -> list[str]:
    """Names of the pods with these labels that are ready."""
    return [pod["metadata"]["name"] for pod in jobs.kubectl.list("pods", **labels) if is_ready(pod)]


def test_a_server_that_never_listens_ends_the_job_with_the_reason(jobs: Jobs) -> None:
    job = document("deaf", "tools", openenv("/files/servers"))
    job["spec"]["environment"]["openenv"] |= {"command": ["sleep", "infinity"], "startSeconds": "20s"}
    jobs.apply(job)

    def failed() -> str | None:
        status = jobs.status("deaf")
        return str(status["message"]) if status.get("phase") == "Failed" else None

    message = jobs.kubectl.wait_until("deaf: failed", failed, 300)
    assert "has no server that answers" in message
    jobs.delete("deaf")
