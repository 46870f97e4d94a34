"""A learning process beside the instance's: takes each step that the instance takes, with its own part of the weights.

    python -m rlhfless_functions.learning.rank_process INSTANCE FOLDER NUMBER THREADS

First it reports that it is ready. The first line of its input is its seat among the ranks, as JSON, and it joins them.
Each further line names a file in FOLDER with a request, or tells it to release its device's memory. It ends when its
input or the process INSTANCE ends. If it fails, it reports why in a line of JSON.
"""

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TextIO

import torch

from rlhfless_functions.api import LearnRequest, SaveRequest, TakeUpRequest, parse_request
from rlhfless_functions.distributed.ranks import Seat, join
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.pieces import LetGoError
from rlhfless_functions.learning.team import READY, SLEEP
from rlhfless_functions.runtime import logs
from rlhfless_functions.runtime.processes import die_with_parent, name_process
from rlhfless_functions.runtime.task import TaskContext, TaskError


def main() -> None:
    """Follow the instance until it ends."""
    parent, folder, number, threads = sys.argv[1:]
    die_with_parent(int(parent))
    name_process(f"learning-rank{number}")
    with os.fdopen(os.dup(1), "w") as reports:
        os.dup2(2, 1)
        status = 1
        try:
            logs.configure(instance=f"learning-rank-{number}")
            _follow(Path(folder), int(threads), reports)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            # Other ranks wait for this process, so it must not wait for them while its interpreter shuts down.
            sys.stderr.flush()
            os._exit(status)


def _follow(folder: Path, threads: int, reports: TextIO) -> None:
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    print(READY, file=reports, flush=True)
    seat = sys.stdin.readline()
    if not seat:
        return
    learner = Learner(join(Seat(**json.loads(seat))))
    for line in sys.stdin:
        try:
            if line.strip() == SLEEP:
                learner.sleep()
                continue
            request = parse_request((folder / line.strip()).read_bytes())
            assert isinstance(request, LearnRequest | TakeUpRequest | SaveRequest)
            with contextlib.suppress(LetGoError):
                learner.run(request, TaskContext(emit=lambda event: None))
        except TaskError as error:
            told = {"reason": error.reason, "message": str(error), "retryable": error.retryable}
            print(json.dumps(told), file=reports, flush=True)
            raise


if __name__ == "__main__":
    main()
