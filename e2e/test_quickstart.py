"""The very file that `rlhfless run` takes, applied with kubectl: the same training, with pods that come and go."""

import hashlib
import json
from pathlib import Path

from harness.kubectl import Kubectl
from harness.quickstart import NAME, Applied
from harness.storage import Storage


def test_reward_rises(applied: Applied, storage: Storage) -> None:
    status = applied.status
    assert (status["step"], status["progress"]) == (applied.steps, f"{applied.steps}/{applied.steps}")
    assert float(status["cost"]) > 0
    summary = json.loads(storage.read(f"{applied.root}/summary.json"))
    assert summary["held_out_reward_after"] > summary["held_out_reward_before"] + 0.3
    print(json.dumps(summary))


def test_the_weights_are_those_of_the_laptop(applied: Applied, storage: Storage, laptop: Path) -> None:
    here = hashlib.sha256((laptop / "model" / "model.safetensors").read_bytes()).hexdigest()
    there = storage.run("sha256sum", f"{applied.root}/model/model.safetensors").split()[0]
    assert there == here
    ours = json.loads((laptop / "summary.json").read_text())
    theirs = json.loads(storage.read(f"{applied.root}/summary.json"))
    assert theirs["held_out_reward_after"] == ours["held_out_reward_after"]


def test_pods_come_and_go_with_their_stages(applied: Applied) -> None:
    pods = applied.pods
    print({stage: (pods.rises(stage), pods.most(stage)) for stage in pods.counts})
    assert pods.most("generation") == 2
    # How often depends on how long pods take to start here: test_lifecycle.py has a job in which it does not.
    assert all(pods.rises(stage) >= 1 for stage in ("generation", "preparation", "learning"))
    assert all(counts[-1] == 0 for counts in pods.counts.values())


def test_kubectl_tells_step_reward_and_cost(applied: Applied, kubectl: Kubectl) -> None:
    header, row = kubectl("get", "rlhf", NAME).splitlines()
    assert header.split() == ["NAME", "PHASE", "STAGE", "STEP", "ACTORS", "REWARD", "COST", "AGE"]
    assert f"{applied.steps}/{applied.steps}" in row
    assert "Succeeded" in row
    assert "reward" in kubectl("explain", "rlhfjob.spec.rewards").lower()
