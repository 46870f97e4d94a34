"""Each job has threads of its own for its folder, whose calls block.

A store that does not answer holds at most the threads of its own job. Where the kernel has Landlock, the threads of a
job whose folder is on a volume can write nothing but this folder, and read nothing but its namespace's folder, the
jobs' files and the operator's own code: a link in it that leads to another tenant's work, or to the operator's
credentials, leads nowhere.
"""

import asyncio
import contextlib
import logging
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from rlhfless_functions import artifacts
from rlhfless_functions.runtime import landlock
from rlhfless_operator.errors import StoreUnavailableError, UserError

_Result = TypeVar("_Result")
_Work = tuple["Future[Any]", Callable[[], Any]]

THREADS_OF_A_JOB = 4
"""Most threads of one job."""
ANSWER_SECONDS = 30.0
"""Seconds that the store has for a look at a job's folder."""
_MOST_LOOKED_AT = 10_000
"""Most files of a folder that are looked at for links. Where there is Landlock, links lead nowhere anyway."""
_IDLE_SECONDS = 30.0
"""Seconds after which a thread without work ends."""
_READABLE = ("/etc", "/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom", "/opt")
"""Files that Python and its packages read."""

_logger = logging.getLogger(__name__)


class LinkedFolderError(UserError):
    """A part of the path to a job's folder is a link, or no folder."""


class JobThreads(ThreadPoolExecutor):
    """The default executor of the operator's event loop. Calls on behalf of a job run in the job's own threads.

    Args:
        threads: most threads for calls on behalf of no job.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads, "operator")

    def submit(self, fn: Callable[..., _Result], /, *args: Any, **kwargs: Any) -> "Future[_Result]":
        """Run a call in a thread of the job that the caller works for."""
        crew = _crew.get()
        return super().submit(fn, *args, **kwargs) if crew is None else crew.submit(lambda: fn(*args, **kwargs))


class Crew:
    """The threads of one job. They are daemons: the operator's end waits for no store.

    Args:
        root: URI of the job's folder.
        base: URI of a folder around it that the operator trusts; no part of the path from there may be a link.
        readable: further folders that the threads may read: the namespace's, and that of all jobs' files.
    """

    def __init__(self, root: str, base: str, readable: Sequence[str] = ()) -> None:
        self._root, self._base = artifacts.local_path(root), artifacts.local_path(base)
        self._readable = [path for uri in readable if (path := artifacts.local_path(uri)) is not None]
        self._work: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        self._counting = threading.Lock()
        self._threads = self._idle = 0

    def submit(self, call: Callable[[], _Result]) -> "Future[_Result]":
        """Run a call in one of the threads, or in the next that is free."""
        future: Future[_Result] = Future()
        with self._counting:
            starts = self._idle <= self._work.qsize() and self._threads < THREADS_OF_A_JOB
            self._threads += starts
        self._work.put((future, call))
        if starts:
            threading.Thread(target=self._run, name=f"job {self._root}", daemon=True).start()
        return future

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let calls of this context, and of tasks that are made in it, run in these threads."""
        token = _crew.set(self)
        try:
            yield
        finally:
            _crew.reset(token)

    def _run(self) -> None:
        refusal: Exception | None = None
        try:
            self._confine()
        except (OSError, UserError) as error:
            refusal = error
        while True:
            with self._counting:
                self._idle += 1
            try:
                future, call = self._work.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._counting:
                    if self._work.empty():
                        self._idle -= 1
                        self._threads -= 1
                        return
                    self._idle -= 1
                continue
            with self._counting:
                self._idle -= 1
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if refusal is not None:
                    raise refusal
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del future, call
            if refusal is not None:
                # The next thread tries again.
                with self._counting:
                    self._threads -= 1
                    starts = not self._work.empty() and self._threads < THREADS_OF_A_JOB
                    self._threads += starts
                if starts:
                    threading.Thread(target=self._run, name=f"job {self._root}", daemon=True).start()
                return

    def _confine(self) -> None:
        if self._root is None or self._base is None:
            return
        folder = open_folder(self._base, self._root)
        try:
            if not landlock.version():
                return
            code = map(Path, (*_READABLE, sys.prefix, sys.base_prefix, *filter(None, sys.path)))
            scratch = Path(tempfile.gettempdir())
            with landlock.Ruleset([*code, *self._readable], [folder]) as rules:
                if not self._base.is_relative_to(scratch):
                    rules.allow_all(scratch)
                rules.confine()
        finally:
            os.close(folder)


_crew: ContextVar[Crew | None] = ContextVar("crew", default=None)


def open_folder(base: Path, folder: Path) -> int:
    """Make a folder below `base` if it is missing, and return its descriptor. No part of the path may be a link.

    Raises:
        LinkedFolderError: a part is a link, or no folder.
        OSError: it can't be opened or made.
    """
    base.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(base, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    place = base
    for part in folder.relative_to(base).parts:
        place /= part
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=descriptor)
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor)
        except NotADirectoryError as error:
            raise LinkedFolderError(f"{place} is a link or a file; remove it, or choose another folder") from error
        finally:
            os.close(descriptor)
        descriptor = inner
    return descriptor


def check_links(root: str) -> None:
    """Refuse a folder that has a link in it which leads out of it. Blocks.

    Raises:
        LinkedFolderError: it has one.
    """
    folder = artifacts.local_path(root)
    if folder is None:
        return
    seen = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            # W&B makes links within its folder.
            if path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
                raise LinkedFolderError(f"{path} is a link that leads out of the job's folder; remove it")
        seen += len(folders) + len(files)
        if seen > _MOST_LOOKED_AT:
            return


async def in_time(call: Callable[..., _Result], *args: Any) -> _Result:
    """Return the result of a call that blocks and runs in a thread.

    Raises:
        StoreUnavailableError: it takes too long. Its thread stays with it.
        Exception: its error.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await asyncio.to_thread(call, *args)
    except TimeoutError as error:
        raise StoreUnavailableError(
            f"the artifact store has not answered for {ANSWER_SECONDS:g} s; check it, and the job's URIs"
        ) from error


def say_what_the_machine_lacks() -> None:
    """Log a warning if the kernel has no Landlock."""
    if not landlock.version():
        _logger.warning(
            "this kernel has no Landlock: links that a job's pods make in its folder, while a driver runs, are followed"
        )
