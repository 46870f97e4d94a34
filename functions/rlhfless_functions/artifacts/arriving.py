"""A published folder that is being fetched: the beginning of a file can be used before its end has arrived.

Bytes that are read early are not checked yet. Use them only once `Arriving.result` has returned, and only if no file
was begun again (`Arriving.sound`).
"""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TypeVar

_Read = TypeVar("_Read")


class BegunAgainError(Exception):
    """A file was begun again after some of it had been read: the bytes that were read may be damaged."""


class Arriving:
    """A folder that a thread of its own fetches. Any thread may call all methods.

    Args:
        fetch: fetches the folder, reports to this object meanwhile, and returns the complete, checked folder.
    """

    def __init__(self, fetch: "Callable[[Arriving], Path]") -> None:
        self._fetch = fetch
        self._changed = threading.Condition()
        self._folder: Path | None = None
        self._names: frozenset[str] = frozenset()
        self._lengths: dict[str, int] = {}
        """Bytes of each file that have arrived, from its beginning."""
        self._complete: set[str] = set()
        self.all_there = False
        """Whether all files were there from the beginning. They may still be unchecked."""
        self.sound = True
        """Whether no file was begun again."""
        self._result: Path | None = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="weights arrive", daemon=True).start()

    # --- reports of the fetching thread ---

    def begins(self, folder: Path, names: Collection[str], *, all_there: bool = False) -> None:
        """Record the files of this folder. They appear one by one, or all are there and only unchecked."""
        with self._changed:
            self._folder, self._names, self.all_there = folder, frozenset(names), all_there
            self._changed.notify_all()

    def moved(self, folder: Path) -> None:
        """Record the folder's new name."""
        with self._changed:
            self._folder = folder
            self._changed.notify_all()

    def began(self, name: str) -> None:
        """Record that a file is written from its beginning, perhaps once more."""
        with self._changed:
            self.sound = self.sound and not self._lengths.get(name)
            self._lengths[name] = 0
            self._changed.notify_all()

    def grew(self, name: str, length: int) -> None:
        """Record how many bytes of a file have arrived, from its beginning."""
        with self._changed:
            self._lengths[name] = length
            self._changed.notify_all()

    def completed(self, name: str) -> None:
        """Record that a file is complete and checked."""
        with self._changed:
            self._complete.add(name)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            result = self._fetch(self)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()
        else:
            with self._changed:
                self._result = self._folder = result
                self._changed.notify_all()

    # --- questions of readers ---

    @property
    def ended(self) -> bool:
        """Whether the fetch has ended, also with an error."""
        return self._result is not None or self._error is not None

    @property
    def failed(self) -> bool:
        """Whether fetching it has failed."""
        return self._error is not None

    def names(self) -> frozenset[str]:
        """Return the folder's file names as soon as they are known; empty if they are known only once it is complete.

        Raises:
            Exception: an error of fetching.
        """
        with self._changed:
            self._wait(lambda: self._folder is not None)
            return self._names

    def wait(self, name: str, length: int) -> None:
        """Wait for the first bytes of a file.

        Raises:
            BegunAgainError: a file was begun again.
            Exception: an error of fetching.
        """
        with self._changed:
            self._wait(lambda: self._has(name) or self._lengths.get(name, 0) >= length or not self.sound)
            if not self.sound:
                raise BegunAgainError(f"{name} is fetched again from its beginning")

    def wait_for(self, name: str) -> None:
        """Wait for a whole file. It is checked, unless the folder is a local one.

        Raises:
            Exception: an error of fetching.
        """
        with self._changed:
            self._wait(lambda: self._has(name))

    def read(self, function: Callable[[Path], _Read]) -> _Read:
        """Return the result of a function that reads the folder, which may be renamed meanwhile.

        Raises:
            Exception: an error of the function or of fetching.
        """
        while True:
            with self._changed:
                self._wait(lambda: self._folder is not None)
                folder = self._folder
            assert folder is not None
            try:
                return function(folder)
            except Exception:
                with self._changed:
                    if folder == self._folder:
                        if self._result is not None or all((folder / name).exists() for name in self._complete):
                            raise
                        # Fetching has failed, and its files are being removed: its own error says more.
                        self._wait(lambda: self._folder != folder)  # noqa: B023

    def result(self) -> Path:
        """Return the complete, checked folder.

        Raises:
            Exception: an error of fetching.
        """
        with self._changed:
            self._wait(lambda: False)
            assert self._result is not None
            return self._result

    def _has(self, name: str) -> bool:
        return self.all_there or name in self._complete

    def _wait(self, there: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error is not None or self._result is not None or there())
        if self._error is not None:
            raise self._error
