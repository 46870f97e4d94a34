"""A job's folder in the artifact store: pure functions of its document.

The operator may read, write and delete everything in the store, and a job says where its folder is. So every namespace
has a folder of its own in each base that the administrator gives, and its jobs' folders are in there.
"""

from collections.abc import Iterable
from typing import NamedTuple

from rlhfless_functions import artifacts
from rlhfless_operator.errors import UserError

_Spelling = tuple[str, tuple[str, ...]]
"""A URI in its only spelling: its scheme (empty for a path), and its components."""


class OutsideStoreError(UserError):
    """`spec.artifacts.uri` is not in a store that jobs may use."""


class JobPlace(NamedTuple):
    """The place of a job's folder."""

    root: str
    """URI of the folder, `BASE/NAMESPACE/PATH/NAME`."""
    base: str
    """URI of the store that it is in."""


def place_of(uri: str, namespace: str, name: str, base: str, further: Iterable[str] = ()) -> JobPlace:
    """Return where a job's folder is.

    Args:
        uri: `spec.artifacts.uri`: PATH, or a URI below a base, or below a namespace's own folder there.
        namespace: the job's namespace.
        name: the job's name.
        base: the operator's artifact store.
        further: bases that the administrator lists besides.

    Raises:
        OutsideStoreError: the URI is below none of them, or leads out of its folder.
    """
    given = _spelt(uri)
    if given is None:
        raise OutsideStoreError(
            f"spec.artifacts.uri: {uri!r:.200} has `..` or `::` in it; write the folder itself, such as runs"
        )
    if not given[0] and not uri.startswith(("/", "file:", "local:")):
        return JobPlace(artifacts.join(base, namespace, *given[1], name), base)
    bases = [(place, each) for each in (base, *further) if (place := _spelt(each)) is not None]
    for (scheme, parts), each in sorted(bases, key=lambda found: -len(found[0][1])):
        if given[0] == scheme and given[1][: len(parts)] == parts:
            rest = given[1][len(parts) :]
            own = rest[1:] if rest[:1] == (namespace,) else rest
            return JobPlace(artifacts.join(each, namespace, *own, name), each)
    raise OutsideStoreError(
        f"spec.artifacts.uri: {uri!r:.200} is outside of the operator's artifact store; write a path in it, such as"
        " runs, or ask the administrator to list this URI (artifacts.further of the chart)"
    )


def _spelt(uri: str) -> _Spelling | None:
    """Return a URI in its only spelling; None if parts of it lead elsewhere."""
    path = artifacts.local_path(uri)
    scheme, rest = ("", str(path)) if path is not None else (uri.partition("://")[0], uri.partition("://")[2])
    parts = tuple(part for part in rest.split("/") if part not in ("", "."))
    if ".." in parts or "::" in uri or "://" in rest or not uri.isprintable():
        return None
    return scheme, parts
