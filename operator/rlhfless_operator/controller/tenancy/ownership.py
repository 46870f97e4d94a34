"""The owner of a job's folder: one resource, by its uid."""

from pydantic import BaseModel, ConfigDict, ValidationError

from rlhfless_functions import artifacts
from rlhfless_operator.controller.resource import ADOPT, JobResource
from rlhfless_operator.records.folder import JobFolder

_FILE = "owner.json"
_MOST_BYTES = 2**14
_UNKNOWN = "?"
_BEGUN = ("job.yaml", "status.json")
"""Files that exist in a folder once a driver has used it."""


class FolderTakenError(Exception):
    """The folder holds the work of another owner; the message names the owner and the remedies."""


class Owner(BaseModel):
    """The resource that owns a folder."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    uid: str
    namespace: str
    name: str


def claim(folder: JobFolder, resource: JobResource) -> None:
    """Make the resource the folder's owner, unless it has another owner.

    Raises:
        FolderTakenError: the folder has another owner, and the resource has no annotation to adopt it. No annotation
            adopts the work of another namespace.
        ArtifactError: the folder can't be read or written.
    """
    uri = folder.file(_FILE)
    mine = Owner(uid=resource.uid, namespace=resource.namespace, name=resource.name)
    owner = _owner(uri)
    if owner is not None and owner.uid == mine.uid:
        return
    if owner is not None and owner.namespace not in (mine.namespace, _UNKNOWN):
        raise FolderTakenError(
            f"{folder.root} holds the work of a job of another namespace; choose another metadata.name or"
            " spec.artifacts.uri"
        )
    begun = owner is not None or any(artifacts.exists(folder.file(name)) for name in _BEGUN)
    if begun and not resource.adopt:
        whose = f"the RLHFJob {owner.namespace}/{owner.name} (uid {owner.uid})" if owner else "`rlhfless run`"
        raise FolderTakenError(
            f"{folder.root} holds the work of {whose}; choose another metadata.name or spec.artifacts.uri, or delete"
            f' the folder and create the job again, or adopt the work with the annotation {ADOPT}: "true"'
        )
    content = mine.model_dump_json().encode()
    if begun:
        artifacts.write_bytes(uri, content)
    elif not artifacts.create_exclusive(uri, content):
        # Another resource was faster.
        claim(folder, resource)


def _owner(uri: str) -> Owner | None:
    if not artifacts.exists(uri):
        return None
    try:
        return Owner.model_validate_json(artifacts.read_bytes(uri, most=_MOST_BYTES))
    except ValidationError:
        return Owner(uid="", namespace=_UNKNOWN, name=_UNKNOWN)
