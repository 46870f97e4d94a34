"""The removal of artifacts that are no longer needed."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from rlhfless_functions import artifacts
from rlhfless_operator.job.spec import RLHFJobSpec
from rlhfless_operator.planner.groups.staleness import last_step_begun, oldest_version
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import RLHFJobStatus
from rlhfless_operator.training.journal.older_checkpoints import checkpoint_step, checkpoints_until

NO_GROUPS: Mapping[str, int] = {}
"""The needs of a job whose groups keep to their step."""


def remove_remains(folder: JobFolder) -> None:
    """Remove what killed drivers and instances left half-written."""
    artifacts.sweep(folder.root, [folder.root])


def remove_leftovers(folder: JobFolder) -> None:
    """Remove the lines of all versions, once no instance fetches any, and what killed instances left half-written.

    Neither is a reason for a job to fail.
    """
    with suppress(artifacts.ArtifactError):
        artifacts.remove(folder.file("lines"))
        remove_remains(folder)


@dataclass(frozen=True)
class Retention:
    """The artifacts that a job keeps."""

    checkpoints: int
    """Number of newest checkpoints, with the batches since the oldest of them: if one is damaged, an older one
    serves."""
    staleness: int = 0
    """Largest age, in versions, of the weights that generate a step. So many steps may be made ahead."""
    rollouts: bool = False
    """Whether the batches of all steps stay."""


def retention_of(spec: RLHFJobSpec) -> Retention:
    """Return the retention that a job's document asks for."""
    ahead = spec.asynchronous.max_staleness if spec.asynchronous is not None else 0
    return Retention(spec.checkpoints.keep, ahead, spec.checkpoints.keep_rollouts)


def remove_garbage(
    folder: JobFolder,
    status: RLHFJobStatus,
    retention: Retention,
    draft_steps: Collection[int] = (),
    needs: Mapping[str, int] = NO_GROUPS,
) -> None:
    """Remove what the status does not name and no fresh learner or running step needs.

    Args:
        draft_steps: steps whose responses may still be drafted from.
        needs: of groups that any later step may take; see `FreeGroups.needs`.
    """
    for kind, keep in kept(folder, status, retention, draft_steps, needs).items():
        artifacts.sweep(folder.file(kind), keep)


def kept(
    folder: JobFolder,
    status: RLHFJobStatus,
    retention: Retention,
    draft_steps: Collection[int] = (),
    needs: Mapping[str, int] = NO_GROUPS,
) -> dict[str, list[str]]:
    """Return the URIs that stay, by sub-folder.

    These are the newest and the best weights, the newest critic, the newest checkpoints, the batches of all steps since
    the oldest of them (or of all steps), and responses to draft from. The files that the running step, the one after
    the status's, may be writing stay, too, and what the learner may be saving of its state beside that step. In an
    asynchronous job several steps run, and the weights that sample them stay. The learner may have published the
    running step already, and be publishing the next one. Only the weights that sample have lines.
    """
    running = status.step + 1
    publishing = (running, running + 1) if retention.staleness else (running,)
    last = max(last_step_begun(status.step, retention.staleness), needs.get("last", 0))
    under_way = range(min(running, needs.get("rollout", running)), last + 1)
    checkpoints = _newest_checkpoints(folder, status, retention.checkpoints)
    # While there are fewer checkpoints than are kept, the model as given serves as well.
    enough = len(checkpoints) == retention.checkpoints and not retention.rollouts
    repeated_from = checkpoint_step(checkpoints[0]) + 1 if enough else 1
    since_checkpoint = range(min(repeated_from, under_way.start, needs.get("batch", running)), under_way.stop)
    oldest = oldest_version(running, retention.staleness)
    sampling = {*range(min(oldest, needs.get("version", oldest)), running), *publishing}
    versions = sampling | {named.version for named in (status.weights, status.best) if named is not None}
    critics = {*publishing} | ({status.critic.version} if status.critic else set())
    return {
        "weights": [folder.weights(version) for version in versions],
        "lines": [folder.line(version) for version in sampling],
        "critics": [folder.critic(version) for version in critics],
        "checkpoints": [
            *map(folder.checkpoint, (status.step, *publishing)),
            *checkpoints,
        ],
        "states": [
            *map(folder.state, (status.step, *publishing)),
            *([status.checkpoint.uri] if status.checkpoint is not None else []),
        ],
        "rollouts": [
            *(folder.rollouts(step, "training") for step in under_way),
            folder.rollouts(running, "evaluation"),
        ],
        "prefixes": [
            *(folder.prefixes(step, "training") for step in under_way),
            folder.prefixes(running, "evaluation"),
        ],
        "batches": [
            *(folder.batches(step, "training") for step in since_checkpoint),
            folder.batches(running, "evaluation"),
        ],
        # The newest step's results include its export.
        "results": [*(folder.results(step) for step in (0, status.step, *since_checkpoint))],
        "drafts": [*(folder.drafts(step) for step in {*draft_steps, *under_way})],
        "progress": [folder.progress(status.step), folder.progress(running)],
    }


def _newest_checkpoints(folder: JobFolder, status: RLHFJobStatus, count: int) -> list[str]:
    return [] if status.checkpoint is None else checkpoints_until(folder, status.checkpoint.uri)[-count:]
