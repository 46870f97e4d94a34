"""The layout of a job's folder in the artifact store."""

from rlhfless_functions.api import Purpose
from rlhfless_functions.artifacts import join


class JobFolder:
    """The URIs of one job's artifacts.

    Args:
        root: URI of the job's folder.
    """

    def __init__(self, root: str) -> None:
        self.root = root

    def file(self, name: str) -> str:
        """Return the URI of a file for the user or the driver: `status.json`, `metrics.jsonl`, `report.html` and so
        on."""
        return join(self.root, name)

    def data(self, purpose: Purpose) -> str:
        """Return the URI of the materialised dataset."""
        return join(self.root, "data", purpose)

    def rollouts(self, step: int, purpose: Purpose) -> str:
        """Return the URI of the sinks of one step's actors."""
        return join(self.root, "rollouts", _named(step, purpose))

    def prefixes(self, step: int, purpose: Purpose) -> str:
        """Return the keys and values of shared prefixes that a step's actors have computed for others."""
        return join(self.root, "prefixes", _named(step, purpose))

    def batches(self, step: int, purpose: Purpose) -> str:
        """Return the URI of the prepared chunks of one step, and the results that announced them."""
        return join(self.root, "batches", _named(step, purpose))

    def pieces(self, step: int) -> str:
        """Return the journal of the pieces of one step's batch."""
        return join(self.batches(step, "training"), "pieces")

    def trace(self, step: int, part: str) -> str:
        """Return the URI of a part of the run's trace: the lengths of a chunk's responses."""
        return join(self.root, "traces", _step(step), f"{part}.parquet")

    def drafts(self, step: int) -> str:
        """Return the URI of a step's responses, from which later steps draft tokens; a part for each chunk."""
        return join(self.root, "drafts", _step(step))

    def weights(self, step: int) -> str:
        """Return the URI of a weights version."""
        return join(self.root, "weights", _step(step))

    def line(self, step: int) -> str:
        """Return the URI of the line of the instances that fetch a weights version."""
        return join(self.root, "lines", _step(step))

    def critic(self, step: int) -> str:
        """Return the URI of the critic's version."""
        return join(self.root, "critics", _step(step))

    def checkpoint(self, step: int) -> str:
        """Return the weights, critic and optimizer state after a step."""
        return join(self.root, "checkpoints", _step(step))

    def state(self, step: int) -> str:
        """Return what a learner that was let go after a step has saved: the same as a checkpoint, for its successor."""
        return join(self.root, "states", _step(step))

    def progress(self, step: int) -> str:
        """Return the URI of the control plane's own state after a step: data cursor and length predictions."""
        return join(self.root, "progress", f"{_step(step)}.json")

    def result(self, name: str, step: int) -> str:
        """Return the URI of the result of a task whose output is a folder, or a stage's record."""
        return join(self.results(step), f"{name}.json")

    def results(self, step: int) -> str:
        """Return the URI of all results of a step."""
        return join(self.root, "results", _step(step))

    def begun(self, step: int) -> str:
        """Return the URI of the record of the weights with which an asynchronous job samples a step's groups."""
        return join(self.root, "journal", f"{_step(step)}-begun.json")

    def taken(self, step: int) -> str:
        """Return the URI of the record of the groups that a step of an asynchronous job learns from."""
        return join(self.root, "journal", f"{_step(step)}-taken.json")

    @property
    def replay(self) -> str:
        """The output of a replay of the run."""
        return join(self.root, "replay")

    @property
    def export(self) -> str:
        """The trained model, as a Hugging Face folder."""
        return join(self.root, "model")


def _step(step: int) -> str:
    return f"step-{step:06d}"


def _named(step: int, purpose: Purpose) -> str:
    return _step(step) if purpose == "training" else f"{_step(step)}-{purpose}"
