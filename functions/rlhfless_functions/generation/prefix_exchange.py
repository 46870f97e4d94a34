"""Keys and values of shared prefixes on their way through a store that is not a file system of this machine.

An engine reads and writes files in a local folder. Threads beside it upload the files that it writes, and download
those that it waits for. It never waits for the store itself. The name of an object has the name of its file and the
checksum of its content. A reader that finds other content takes the object for missing. Some stores show an object
before all of it has arrived, so a reader checks such an object a few times.
"""

import hashlib
import logging
import shutil
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from rlhfless_functions.artifacts.errors import ArtifactError, reading, writing
from rlhfless_functions.artifacts.files import join, list_files, remote

_THREADS = 4
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.1, 1.0
"""Seconds between checks of the store for wanted files. Each pause is half as long again as the one before."""
_WRITE_SECONDS, _WRITE_LOOKS = 0.02, 1000
"""Seconds between checks for a file that the engine is writing, and the most checks."""
_MOST_REFUSALS = 5
"""Most checks of an object that does not have the sent content."""

logger = logging.getLogger(__name__)


class PrefixExchange:
    """The files of one run.

    Args:
        uri: folder in the store that the instances share.
    """

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self.folder = Path(tempfile.mkdtemp(prefix="rlhfless-prefixes-"))
        """Folder in which the engine reads and writes the files, until the exchange is closed."""
        self._threads = ThreadPoolExecutor(_THREADS, "prefixes")
        self._closed = threading.Event()
        self._changing = threading.Lock()
        self._asked: set[str] = set()
        """Files that the engine has ever wanted."""
        self._missing: set[str] = set()
        """Wanted files that are neither here nor being fetched."""
        self._looking = False
        self._refused: Counter[str] = Counter()
        """Number of times that an object did not have the sent content."""
        self._seconds = {"seconds_sent": 0.0, "seconds_fetched": 0.0}

    def want(self, name: str) -> None:
        """Fetch a file as soon as another instance has sent it. It appears in the folder as a whole."""
        if name not in self._asked:
            self._asked.add(name)
            self._miss(name)

    def send(self, name: str) -> None:
        """Send a file as soon as the engine has written it."""
        self._threads.submit(self._send, name)

    def seconds(self) -> dict[str, float]:
        """Return the seconds that the store has taken so far, over all files: `seconds_sent` and `seconds_fetched`."""
        with self._changing:
            return dict(self._seconds)

    def close(self) -> None:
        """Send the written files, fetch nothing more, and remove the folder."""
        self._closed.set()
        self._threads.shutdown(wait=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _miss(self, name: str) -> None:
        with self._changing:
            self._missing.add(name)
            begin, self._looking = not self._looking, True
        if begin:
            threading.Thread(target=self._look, name="prefixes-look", daemon=True).start()

    def _look(self) -> None:
        """Look for missing files until none is missing, ever less often while none is found."""
        pause = _FIRST_LOOK_SECONDS
        while not self._closed.is_set():
            found = self._found()
            for name, uri in found.items():
                with suppress(RuntimeError):  # Closed meanwhile.
                    self._threads.submit(self._fetch, uri, name)
            with self._changing:
                if not self._missing:
                    self._looking = False
                    return
            pause = _FIRST_LOOK_SECONDS if found else min(1.5 * pause, _LAST_LOOK_SECONDS)
            self._closed.wait(pause)

    def _found(self) -> dict[str, str]:
        """Return the objects of files that were missing and are not any more."""
        try:
            uris = list_files(self._uri)
        except ArtifactError as error:
            logger.warning("shared prefixes can't be looked for now: %s", error)
            return {}
        with self._changing:
            # Of several objects for a file, the last counts.
            usable = (uri for uri in uris if self._refused[uri] < _MOST_REFUSALS)
            uris = sorted(usable, key=lambda uri: -self._refused[uri])
            by_name = {uri.rsplit("/", 1)[-1].rpartition(".")[0]: uri for uri in uris}
            found = {name: by_name[name] for name in self._missing & by_name.keys()}
            self._missing -= found.keys()
        return found

    def _fetch(self, uri: str, name: str) -> None:
        if self._closed.is_set():
            return
        began, part = time.monotonic(), self.folder / f".tmp-{name}"
        try:
            filesystem, path = remote(uri)
            with reading(uri):
                filesystem.get_file(path, str(part))
            if uri.endswith(f".{_checksum(part)}"):
                part.replace(self.folder / name)
                return
            with self._changing:
                self._refused[uri] += 1
                damaged = self._refused[uri] == _MOST_REFUSALS
            if damaged:
                logger.warning("the shared prefix %s is damaged and is not used", uri)
        except (ArtifactError, OSError) as error:
            logger.warning("the shared prefix %s can't be fetched now: %s", uri, error)
        finally:
            self._count("seconds_fetched", time.monotonic() - began)
        self._closed.wait(_FIRST_LOOK_SECONDS)
        self._miss(name)

    def _send(self, name: str) -> None:
        file = self.folder / name
        for _ in range(_WRITE_LOOKS):
            if file.exists() or self._closed.wait(_WRITE_SECONDS):
                break
        if not file.exists():
            return
        began = time.monotonic()
        try:
            uri = join(self._uri, f"{name}.{_checksum(file)}")
            filesystem, path = remote(uri)
            with writing(uri):
                filesystem.put_file(str(file), path)
        except (ArtifactError, OSError) as error:
            logger.warning("a shared prefix can't be sent; other actors compute it: %s", error)
        finally:
            self._count("seconds_sent", time.monotonic() - began)

    def _count(self, name: str, seconds: float) -> None:
        with self._changing:
            self._seconds[name] += seconds


def _checksum(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
