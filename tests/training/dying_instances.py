"""Instances that kill themselves before, within and after each of their writes, once at each place."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import files, publication
from tests.training.altered_functions import altered_functions
from tests.training.dying_at_writes import Deaths

_DYING = "RLHFLESS_DYING"


@contextmanager
def dying_instances(folder: Path, deaths: Path, share: int) -> Iterator[None]:
    """Have the instances of a job die at one of `share` places of their writes.

    Args:
        folder: of the job.
        deaths: gets a line for each death.
    """
    settings = os.pathsep.join([str(deaths), str(folder), str(share)])
    with altered_functions(f"{__name__}:die_at_writes", **{_DYING: settings}):
        yield


def die_at_writes() -> None:
    """Have each write of the instances of this fork server interrupted."""
    file, root, share = os.environ[_DYING].split(os.pathsep)
    deaths = Deaths(Path(file), Path(root), int(share))

    def place(path: Path | str) -> str:
        """Return a name that is the same for each instance: without numbers, except that of the step."""
        name = re.sub(r"\.tmp-\w+", ".tmp", str(path).removeprefix(f"{root}/"))
        return re.sub(r"(?<!step-)(?<!\d)\d+", "N", name)

    for name in ("write_bytes", "create_exclusive", "remove"):
        dying = deaths.around(name, getattr(files, name), place)
        setattr(files, name, dying)
        setattr(artifacts, name, dying)

    written_beside, move, flush = files._written_beside, publication._move, publication.flush

    @contextmanager
    def dying_beside(path: Path, data: bytes) -> Iterator[Path]:
        with written_beside(path, data) as temporary:
            deaths.at(f"within write {place(path)}")
            yield temporary

    def dying_move(flushed: Any, target: Path) -> None:
        deaths.at(f"before publish {place(target)}")
        move(flushed, target)
        deaths.at(f"after publish {place(target)}")

    def dying_flush(path: Path) -> Any:
        flush(path)
        deaths.at(f"within publish {place(path)}")

    files._written_beside, publication._move, publication.flush = dying_beside, dying_move, dying_flush
