"""Learners that publish a version no earlier than they learn the next step, however fast the machine is.

`LATE` is the text of a `sitecustomize` module: the processes that a test starts have it.
"""

from pathlib import Path

import pytest

LATE = """
import os, sys, time

FOLDER = os.environ["RLHFLESS_TEST_PUBLISHING"]

def delay():
    if (publication := sys.modules.get("rlhfless_functions.learning.held_version")) is None:
        return
    from rlhfless_functions import artifacts
    from rlhfless_functions.learning import learner

    publish, train_step = publication.HeldVersion.publish, learner.train_step

    def note(what):
        with open(f"{FOLDER}/learners", "a") as lines:
            lines.write(what + "\\n")

    def publish_late(held):
        version = held.state.version
        deadline = time.monotonic() + 20
        while held.state.version == version and not os.path.exists(f"{FOLDER}/soon") and time.monotonic() < deadline:
            time.sleep(0.01)
        if os.path.exists(f"{FOLDER}/full"):
            raise artifacts.ArtifactUnwritableError(f"{held.version.weights}: the disk is full")
        metrics = publish(held)
        note(f"published {version}")
        return metrics

    def learn(state, batch, request, step, check):
        report = train_step(state, batch, request, step, check)
        note(f"learnt {step}")
        return report

    publication.HeldVersion.publish, learner.train_step = publish_late, learn

os.register_at_fork(after_in_child=delay)
"""


class LatePublishing:
    """What learners are told, and what they have done.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def course(self) -> list[str]:
        """What learners have learnt and published beside a step, in this order."""
        return (self.folder / "learners").read_text().splitlines()

    def fail(self, fails: bool) -> None:
        """Whether publications fail."""
        (self.folder / "full").touch() if fails else (self.folder / "full").unlink()


def publish_late(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LatePublishing:
    """Have learners publish late."""
    for name in ("hook", "told"):
        (folder / name).mkdir()
    (folder / "hook" / "sitecustomize.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(folder / "hook"), prepend=":")
    monkeypatch.setenv("RLHFLESS_TEST_PUBLISHING", str(folder / "told"))
    return LatePublishing(folder / "told")
