"""Fetching the files of a published folder from another instance that has it, or is fetching it.

Nothing depends on the other instance. What it sends is used if it has the manifest's size and checksum, and after a
first fault it is asked for nothing more of this folder.
"""

import http.client
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from rlhfless_functions.artifacts.manifest import ManifestEntry
from rlhfless_functions.artifacts.relaying import STUCK_SECONDS

PATH = "/v1/copies"
"""Where instances pass copies on: `PATH/COPY` says whether one does, and `PATH/COPY/FILE` is a file."""
PATIENCE_SECONDS = 2.0
"""How long the nearest instance may take to begin fetching: its request may be a little later."""
ANSWER_SECONDS = 2.0
"""How long an instance may take to say whether it has a version."""
LEAST_RATE = 2**18
"""Bytes a second below which a transfer is given up."""
_POLL_SECONDS = 0.05
_CHUNK = 2**18

logger = logging.getLogger(__name__)


class PeerError(Exception):
    """An instance did not send what was asked for."""


@dataclass(frozen=True)
class Sources:
    """Instances to fetch from."""

    addresses: Sequence[str] = ()
    """URLs of their servers, the nearest in the chain first; the store alone if empty."""
    token: str = ""
    """The job's."""

    @staticmethod
    def of_chain(chain: Sequence[str], own: str | None, token: str) -> "Sources":
        """Those before this instance in a chain; none for its head, and for an instance that is not in it."""
        return Sources(chain[: chain.index(own)][::-1] if own in chain else (), token)


class Peer:
    """The instance that one folder is fetched from, until it fails.

    Args:
        sources: where to look for one.
        copy: name of the folder's copies.
    """

    def __init__(self, sources: Sources, copy: str) -> None:
        self._token = sources.token
        self._copy = copy
        self._failing = threading.Lock()
        self.refused = 0
        """Instances that failed, with or without a transfer."""
        self._address = self._found(sources.addresses)

    def fetch(
        self, name: str, entry: ManifestEntry, target: Path, grew: Callable[[str, int], None] | None = None
    ) -> bool:
        """Fetch a file whole and sound; False if that failed now or before, and `target` may then hold anything.

        Args:
            grew: told the file's name and how many of its bytes are there.

        Raises:
            OSError: if `target` cannot be written.
        """
        address = self._address
        if address is None:
            return False
        try:
            with target.open("wb") as file:
                self._receive(address, name, entry.size, file, grew)
            if not entry.describes(target):
                raise PeerError("its checksum is not the manifest's")
        except PeerError as error:
            with self._failing:
                first, self._address = self._address is not None, None
                self.refused += first
            if first:
                logger.warning("%s from %s is of no use; the store is read instead: %s", name, address, error)
            return False
        return True

    def _found(self, addresses: Sequence[str]) -> str | None:
        """The first instance that has the folder or is fetching it; the nearest is given time to begin."""
        for number, address in enumerate(addresses):
            until = time.monotonic() + (0.0 if number else PATIENCE_SECONDS)
            try:
                while not self._has(address):
                    if time.monotonic() >= until:
                        raise PeerError("it does not have this version")
                    time.sleep(_POLL_SECONDS)
                return address
            except PeerError as error:
                logger.warning("weights can't be fetched from %s: %s", address, error)
                self.refused += 1
        return None

    def _has(self, address: str) -> bool:
        connection = _connection(address, ANSWER_SECONDS)
        try:
            status = self._ask(connection, f"{PATH}/{self._copy}").status
        finally:
            connection.close()
        if status not in (200, 404):
            raise PeerError(f"it answers with {status}")
        return status == 200

    def _receive(
        self, address: str, name: str, size: int, file: BinaryIO, grew: Callable[[str, int], None] | None
    ) -> None:
        connection = _connection(address, STUCK_SECONDS)
        received, window, looked = 0, 0, time.monotonic()
        try:
            answer = self._ask(connection, f"{PATH}/{self._copy}/{quote(name)}")
            if answer.status != 200:
                raise PeerError(f"it answers with {answer.status}")
            while data := _read(answer):
                received += len(data)
                window += len(data)
                if received > size:
                    raise PeerError(f"it sends more than {size} bytes")
                file.write(data)
                # In-order growth is what this process passes on itself.
                file.flush()
                if grew is not None:
                    grew(name, received)
                if (passed := time.monotonic() - looked) > STUCK_SECONDS:
                    if window < LEAST_RATE * passed and received < size:
                        raise PeerError(f"it sends {window / passed:.0f} bytes a second")
                    window, looked = 0, time.monotonic()
        finally:
            connection.close()
        if received < size:
            raise PeerError(f"it sends {received} of {size} bytes")

    def _ask(self, connection: http.client.HTTPConnection, path: str) -> http.client.HTTPResponse:
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{type(error).__name__}: {error}") from error


def _read(answer: http.client.HTTPResponse) -> bytes:
    try:
        return answer.read1(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise PeerError(f"{type(error).__name__}: {error}") from error


def _connection(address: str, timeout: float) -> http.client.HTTPConnection:
    parts = urlsplit(address)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
