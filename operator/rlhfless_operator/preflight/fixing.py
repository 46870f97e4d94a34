"""`rlhfless preflight --fix`: show the changes to Knative, ask, and apply them with the caller's permissions."""

import asyncio
import sys
from collections.abc import Callable, Sequence

import typer
from kubernetes.aio.client import ApiClient

from rlhfless_operator.errors import UserError
from rlhfless_operator.job.spec import RLHFJob
from rlhfless_operator.knative import ApiError, ConflictError, ForbiddenError, NotFoundError, Transport
from rlhfless_operator.knative.transport import MERGE_PATCH
from rlhfless_operator.platforms.cluster_settings import ClusterSettings
from rlhfless_operator.preflight.cluster import pod_spec_of, stages_of
from rlhfless_operator.preflight.features import wanted_features
from rlhfless_operator.preflight.fixes import CONFIG_MAPS, Patch, activator_path, config_map_path, patches

_PATIENCE_SECONDS = 5.0
_MANAGER = "rlhfless-preflight"


class NotFixedError(UserError):
    """Not all changes were applied; the message says which were."""


async def fix(
    api: ApiClient,
    settings: ClusterSettings,
    *,
    job: RLHFJob | None,
    say: Callable[[str], None],
    agrees: Callable[[], bool],
) -> None:
    """Set what jobs need in Knative's ConfigMaps and its activator. Correct settings stay as they are.

    Every patch is first sent as a dry run, which the API server and Knative's admission check. If one refuses, nothing
    is changed.

    Args:
        api: the official client, with the cluster's configuration and the caller's permissions.
        settings: the operator's settings.
        job: also set what this job needs.
        say: gets the text of the planned and the applied changes.
        agrees: called once before anything is changed.

    Raises:
        NotFixedError: the caller does not agree, has no permission, or somebody else changed the same object.
        ManagedElsewhereError: the Knative Operator manages the ConfigMaps.
        UnavailableError: the API server does not answer.
    """
    transport = Transport(api, patience=_PATIENCE_SECONDS)
    wanted = await _look(transport, settings, job, say)
    if not wanted:
        say("Knative already has all of these settings.")
        return
    for patch in wanted:
        say(patch.diff)
    for patch in wanted:
        await _send(transport, patch, done=(), dry_run=True)
    if not agrees():
        raise NotFixedError("nothing was changed")
    done: list[Patch] = []
    for patch in wanted:
        await _send(transport, patch, done=done, dry_run=False)
        done.append(patch)
        say(f"{patch.target} is changed")


def agrees(yes: bool) -> bool:
    """Ask at the terminal whether to apply the changes, unless `yes`.

    Raises:
        NotFixedError: standard input is not a terminal.
    """
    if not yes and not sys.stdin.isatty():
        raise NotFixedError("nothing was changed: standard input is not a terminal; give --yes to apply the changes")
    return yes or typer.confirm("Change this?")


async def _look(
    transport: Transport, settings: ClusterSettings, job: RLHFJob | None, say: Callable[[str], None]
) -> list[Patch]:
    namespace = settings.knative_namespace
    try:
        found = await asyncio.gather(
            *(transport.get(config_map_path(namespace, f"config-{name}")) for name in CONFIG_MAPS)
        )
    except NotFoundError as error:
        raise NotFixedError(
            f"namespace {namespace} has no ConfigMaps of Knative Serving; install it, or name its namespace with"
            f" --knative-namespace"
        ) from error
    except ForbiddenError as error:
        raise NotFixedError(f"you may not read Knative's settings ({error.message}): {_ASK}") from error
    activator = None
    try:
        activator = await transport.get(activator_path(namespace))
    except (NotFoundError, ForbiddenError) as error:
        say(f"The activator's grace period could not be checked: {error.message}")
    stages = stages_of(settings, job, (job.metadata.namespace if job else None) or "default")
    return patches(
        dict(zip(CONFIG_MAPS, found, strict=True)),
        activator,
        namespace=namespace,
        initial_scale=settings.initial_scale,
        request_timeout=settings.request_timeout,
        features=wanted_features(pod_spec_of(stage.pods, settings) for stage in stages),
    )


_ASK = "ask Knative's administrator to run this, or change it by hand (docs/install.md)"


async def _send(transport: Transport, patch: Patch, *, done: Sequence[Patch], dry_run: bool) -> None:
    query = {"fieldManager": _MANAGER} | ({"dryRun": "All"} if dry_run else {})
    so_far = f"changed so far: {', '.join(each.target for each in done)}" if done else "nothing was changed"
    try:
        await transport.send("patch", "PATCH", patch.path, query=query, body=patch.body, content_type=MERGE_PATCH)
    except ConflictError as error:
        raise NotFixedError(
            f"{patch.target} was changed by somebody else at the same time; {so_far}; run this again"
        ) from error
    except ForbiddenError as error:
        raise NotFixedError(f"you may not change {patch.target} ({error.message}); {so_far}: {_ASK}") from error
    except ApiError as error:
        raise NotFixedError(f"{patch.target} could not be changed: {error}; {so_far}") from error
