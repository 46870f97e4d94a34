"""A folder for one program, which is removed whatever the program has left there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def fresh_folder(parent: str) -> Iterator[Path]:
    """Yield a new folder, and remove it afterwards.

    Raises:
        OSError: it can't be made.
    """
    folder = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            remove(folder)


def remove(folder: Path) -> None:
    """Remove a folder with all that is in it. No process may use it any more.

    Folders in it may be nested deeper than a path is long, or than Python recurses, and closed to their owner.

    Raises:
        OSError: something can't be removed.
    """
    moved = 0
    # Each folder moves beside `folder` before it is looked at. So all paths are short.
    waiting = [folder]
    while waiting:
        current = waiting[-1]
        before = len(waiting)
        with os.scandir(current) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    Path(entry.path).unlink()
                    continue
                Path(entry.path).chmod(0o700)
                moved += 1
                waiting.append(Path(entry.path).rename(f"{folder}.{moved}"))
        if len(waiting) == before:
            waiting.pop().rmdir()
