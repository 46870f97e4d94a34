"""The line in which instances that fetch the same published folder find the instances that began before them.

The line is a folder of the store. An instance writes an empty file into it when it begins to fetch. The file's name has
the time and the instance's address. Names order the line. An instance fetches only from the instances before it, and
from those that fetch in a chain and not in this line. So no two wait for each other, even if the clocks of their hosts
differ.
"""

import ipaddress
import logging
import re
import time
import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import urlsplit

from rlhfless_functions.artifacts.errors import ArtifactError
from rlhfless_functions.artifacts.files import join, list_files, write_bytes

MOST_ASKED = 3
"""Most instances of the line that one instance asks."""
OLDEST_SECONDS = 600.0
"""Seconds after which an entry is too old: its instance may have ended, and is not asked."""
SETTLING_SECONDS = 0.3
"""Seconds between entering the line and reading it. Instances that entered a little earlier may still be writing."""
_NAME = re.compile(r"([0-9]{13})-([0-9a-f]{12})-([0-9.]{7,15})-([0-9]{1,5})")

logger = logging.getLogger(__name__)


class _Entry(NamedTuple):
    """One instance's place in the line. Entries compare as their names do."""

    milliseconds: int
    id: str
    address: str


@dataclass(frozen=True)
class Line:
    """The line of one folder, as one instance sees it."""

    folder: str
    """URI of the folder of entries."""
    address: str | None
    """URL of this instance's server. An instance without one can't enter, and finds no others."""
    chain: Collection[str] = ()
    """Addresses of the instances that fetch in a chain. They enter the line only to be found."""

    def enter(self) -> list[str]:
        """Enter the line, and find the instances to fetch from.

        Returns:
            Their addresses, the nearest first; none, after a warning, if the store can't be written or read.
        """
        name = entry_name(time.time(), self.address)
        if name is None:
            return []
        entered = time.monotonic()
        try:
            write_bytes(join(self.folder, name), b"")
            if self.address in self.chain:
                return []
            time.sleep(max(0.0, entered + SETTLING_SECONDS - time.monotonic()))
            names = [uri.rpartition("/")[2] for uri in list_files(self.folder)]
        except ArtifactError as error:
            logger.warning("other instances with these weights can't be found, and the store is read: %s", error)
            return []
        return sources(name, names, self.chain)


def entry_name(at: float, address: str | None) -> str | None:
    """Return the name of a new entry; None if no name can hold the address.

    Args:
        at: Unix seconds.
        address: `http://HOST:PORT`, with an IPv4 address as HOST.
    """
    parts = urlsplit(address or "")
    name = f"{int(at * 1000):013d}-{uuid.uuid4().hex[:12]}-{parts.hostname}-{parts.port}"
    return name if _entry(name) is not None else None


def sources(own: str, names: Iterable[str], chain: Collection[str] = ()) -> list[str]:
    """Return the addresses from which an instance may fetch: first the nearest before it in the line, then those of the
    chain that entered after it.

    An instance that entered twice keeps its first place, because another one may already wait for it.

    Args:
        own: name of its entry.
        names: all names in the line's folder. Names that are not entries are skipped.
        chain: addresses of the instances that fetch in a chain.
    """
    mine = _entry(own)
    assert mine is not None
    entries = sorted({mine, *(entry for name in names if (entry := _entry(name)) is not None)})
    place = next(entry for entry in entries if entry.address == mine.address)
    oldest = mine.milliseconds - OLDEST_SECONDS * 1000
    before = [entry.address for entry in reversed(entries) if entry < place and entry.milliseconds >= oldest]
    after = [entry.address for entry in entries if entry > place and entry.address in chain]
    return list(dict.fromkeys(before + after))[:MOST_ASKED]


def _entry(name: str) -> _Entry | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    milliseconds, number, host, port = match.groups()
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return None
    if not 1 <= int(port) <= 65535:
        return None
    return _Entry(int(milliseconds), number, f"http://{host}:{int(port)}")
