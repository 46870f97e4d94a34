"""Whole jobs whose instances pass new weights on to each other instead of each reading the object store."""

from itertools import pairwise
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from tests.training.test_weight_deltas import OWN_COPIES, run_in_store, weights_in_store
from tests.training.whole_jobs import MakeJob, assert_equal_weights

STEPS = 3
KEPT = {
    "generation": {"instances": {"min": 2, "max": 2}, "keepAlive": "10m"},
    "learning": {"keepAlive": "10m"},
    "steps": STEPS,
}

PATIENT = """
import sys

def wait_longer():
    if (peers := sys.modules.get("rlhfless_functions.artifacts.peers")) is None:
        return
    peers.PATIENCE_SECONDS = peers.ANSWER_SECONDS = 120.0
    sys.modules["rlhfless_functions.artifacts.line"].SETTLING_SECONDS = 3.0

os.register_at_fork(after_in_child=wait_longer)
"""


@pytest.fixture
def own_copies(artifact_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance has copies of its own, and waits for others that a busy machine starts late."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(OWN_COPIES + PATIENT)
    monkeypatch.setenv("PYTHONPATH", str(hook), prepend=":")


@pytest.mark.slow
@pytest.mark.usefixtures("own_copies", "nothing_is_left_behind")
@pytest.mark.nightly
def test_instances_read_the_store_once_and_learn_the_same(tiny_job: MakeJob, s3: str) -> None:
    relayed = {**KEPT, "generation": {**KEPT["generation"], "weightRelays": "auto"}}
    new = {**relayed, "generation": {**relayed["generation"], "keepAlive": "0s"}}
    with_relays = run_in_store(tiny_job("relayed", **relayed), f"{s3}/relayed")[-STEPS:]
    each_step_new = run_in_store(tiny_job("new", **new), f"{s3}/new")[-STEPS:]
    without = run_in_store(tiny_job("alone", **KEPT), f"{s3}/alone")[-STEPS:]
    for before, step in pairwise(without):
        assert step["weights/bytes_fetched"] == 2 * before["weights/bytes"]
    assert not any("weights/bytes_relayed" in step for step in without)
    for steps in (with_relays, each_step_new):
        for before, step in pairwise(steps):
            # What one instance does not read of the store it has from the other one.
            both = step["weights/bytes_fetched"] + step.get("weights/bytes_relayed", 0)
            assert both == 2 * before["weights/bytes"]
    assert with_relays[-1]["weights/bytes_relayed"] == with_relays[-2]["weights/bytes"]
    # An instance may end before the other one begins.
    assert any("weights/bytes_relayed" in step for step in each_step_new)
    for name in ("relayed", "new"):
        assert_equal_weights(weights_in_store(f"{s3}/{name}"), weights_in_store(f"{s3}/alone"))
        assert artifacts.list_files(f"{s3}/{name}/lines") == []
