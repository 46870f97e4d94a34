"""Fetching the files of a published folder from another instance that has the folder or is fetching it.

The driver names instances that it knows in a chain. The others find each other in a line; see `line`.

Nothing depends on the other instance. A file from it is used if it has the manifest's size and checksum. After a first
fault it is asked for nothing more of this folder.
"""

import hashlib
import hmac
import http.client
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, urlsplit

from rlhfless_functions.artifacts.line import Line
from rlhfless_functions.artifacts.manifest import ManifestEntry
from rlhfless_functions.artifacts.relaying import STUCK_SECONDS

PATH = "/v1/copies"
"""Path at which instances pass copies on. `PATH/COPY` tells whether an instance does, and `PATH/COPY/FILE` is a
file."""
PATIENCE_SECONDS = 2.0
"""Seconds that the nearest instance of the chain has to begin fetching: its request may be a little later."""
ANSWER_SECONDS = 2.0
"""Seconds that an instance has to say whether it has a version."""
LEAST_RATE = 2**18
"""Bytes a second below which a transfer is given up."""
_MOST_ASKED = 8
_POLL_SECONDS = 0.05
_CHUNK = 2**18

logger = logging.getLogger(__name__)


class PeerError(Exception):
    """An instance did not send what it was asked for."""


@dataclass(frozen=True)
class Sources:
    """Instances to fetch from."""

    addresses: Sequence[str] = ()
    """URLs of their servers, the nearest in the chain first; if empty, the store is the only source."""
    token: str = ""
    """The job's token."""
    line: Line | None = None
    """The line in which the instance finds others that fetch the same folder."""

    @staticmethod
    def of_chain(chain: Sequence[str], own: str | None, token: str, line: str | None = None) -> "Sources":
        """Return the instances before an instance in a chain. An instance outside the chain fetches from others in the
        line.

        Args:
            chain: addresses of the chain.
            own: address of this instance.
            token: the job's token.
            line: URI of the line's folder, if there is one.
        """
        addresses = chain[: chain.index(own)][::-1] if own in chain else ()
        return Sources(addresses, token, Line(line, own, chain) if line is not None else None)


def copy_token(token: str, copy: str) -> str:
    """Return the token that a request for a copy carries.

    Anyone who can write the job's artifacts can put an address into a line. Such an address learns a token that is good
    for the copy of one folder, and not the job's own token.

    Args:
        token: the job's token.
        copy: name of the copy.
    """
    return hmac.new(token.encode(), f"{PATH}/{copy}".encode(), hashlib.sha256).hexdigest()


class Peer:
    """The instance that one folder is fetched from, until it fails.

    Args:
        sources: the instances to ask.
        copy: name of the folder's copies.
    """

    def __init__(self, sources: Sources, copy: str) -> None:
        self._token = copy_token(sources.token, copy)
        self._copy = copy
        self._failing = threading.Lock()
        self.refused = 0
        """Instances that failed, with or without a transfer."""
        earlier = sources.line.enter() if sources.line is not None else []
        # The instances in the line have begun already.
        self._address = self._found(sources.addresses, PATIENCE_SECONDS) or self._found(earlier, 0.0)

    def fetch(
        self, name: str, entry: ManifestEntry, target: Path, grew: Callable[[str, int], None] | None = None
    ) -> bool:
        """Fetch a whole and sound file. Return False if that failed now or before; `target` may then hold anything.

        Args:
            grew: called with the file's name and the number of bytes that have arrived.

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

    def _found(self, addresses: Sequence[str], patience: float) -> str | None:
        """Return the first instance that has the folder or is fetching it.

        Args:
            addresses: addresses, the nearest first. The nearest is asked alone. If it does not have the folder, the
                others are asked at once.
            patience: seconds that the nearest has to begin.
        """
        nearest, others = addresses[:1], addresses[1:_MOST_ASKED]
        if nearest:
            if self._passes_on(nearest[0], patience):
                return nearest[0]
            self.refused += 1
        if others:
            asking = ThreadPoolExecutor(len(others))
            try:
                for address, has in zip(others, asking.map(self._passes_on, others), strict=True):
                    if has:
                        return address
                    self.refused += 1
            finally:
                asking.shutdown(wait=False)
        return None

    def _passes_on(self, address: str, patience: float = 0.0) -> bool:
        """Return whether an instance has the folder, is fetching it, or begins to in time."""
        until = time.monotonic() + patience
        try:
            while not self._has(address):
                if time.monotonic() >= until:
                    raise PeerError("it does not have this version")
                time.sleep(_POLL_SECONDS)
        except PeerError as error:
            logger.warning("weights can't be fetched from %s: %s", address, error)
            return False
        return True

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
                # This process passes the file on as it grows, so it must grow in order.
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
