"""Which artifacts nobody needs any more."""

from collections.abc import Collection

from rlhfless_functions import artifacts
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.records.status import RLHFJobStatus


def remove_remains(folder: JobFolder) -> None:
    """Remove what drivers and instances that were killed left half-written."""
    artifacts.sweep(folder.root, artifacts.list_files(folder.root))


def remove_garbage(
    folder: JobFolder, status: RLHFJobStatus, keep_checkpoints: int, draft_steps: Collection[int] = ()
) -> None:
    """Remove what neither the status names, nor a fresh learner would need, nor the step that runs now.

    Args:
        draft_steps: steps whose responses may yet be drafted from.
    """
    for kind, keep in kept(folder, status, keep_checkpoints, draft_steps).items():
        artifacts.sweep(folder.file(kind), keep)


def kept(
    folder: JobFolder, status: RLHFJobStatus, keep_checkpoints: int, draft_steps: Collection[int] = ()
) -> dict[str, list[str]]:
    """URIs that stay, by sub-folder.

    These are the newest and the best weights, the newest critic, the newest checkpoints, the batches of all steps since
    the newest checkpoint, responses to draft from, and whatever the running step, the one after the status's, may be
    writing.
    """
    running = status.step + 1
    replayed_from = status.checkpoint.step + 1 if status.checkpoint else 1
    since_checkpoint = range(min(replayed_from, running), running + 1)
    versions = {running} | {named.version for named in (status.weights, status.best) if named is not None}
    critics = {running} | ({status.critic.version} if status.critic else set())
    return {
        "weights": [folder.weights(version) for version in versions],
        "critics": [folder.critic(version) for version in critics],
        "checkpoints": [folder.checkpoint(running), *_newest_checkpoints(folder, status, keep_checkpoints)],
        "rollouts": [folder.rollouts(running, "training"), folder.rollouts(running, "evaluation")],
        "prefixes": [folder.prefixes(running, "training"), folder.prefixes(running, "evaluation")],
        "batches": [
            *(folder.batches(step, "training") for step in since_checkpoint),
            folder.batches(running, "evaluation"),
        ],
        # The newest step's results have its export, too.
        "results": [*(folder.results(step) for step in (0, status.step, *since_checkpoint))],
        "drafts": [*(folder.drafts(step) for step in {*draft_steps, running})],
        "progress": [folder.progress(status.step), folder.progress(running)],
    }


def _newest_checkpoints(folder: JobFolder, status: RLHFJobStatus, count: int) -> list[str]:
    if status.checkpoint is None:
        return []
    root = folder.file("checkpoints")
    names = {uri[len(root) :].strip("/").split("/")[0] for uri in artifacts.list_files(root)}
    # Names hold the step with leading zeros: their order is the steps'.
    written = sorted(name for name in names if artifacts.join(root, name) <= status.checkpoint.uri)
    return [artifacts.join(root, name) for name in written[-count:]]
