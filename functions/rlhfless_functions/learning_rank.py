"""A learning process beside the instance: takes each step that the instance is asked for, with its part of the weights.

    python -m rlhfless_functions.learning_rank PORT RANK SIZE THREADS

It reads one request a line and ends with its input. If it fails it says why in a line of JSON, and ends.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

from rlhfless_functions import logs
from rlhfless_functions.api import LearnRequest
from rlhfless_functions.learning import Learner
from rlhfless_functions.parent_death import die_with_parent, name_process
from rlhfless_functions.ranks import join
from rlhfless_functions.task import TaskContext, TaskError


def main() -> None:
    """Follow rank 0 until it ends."""
    parent = os.getppid()
    die_with_parent(parent)
    port, rank, size, threads = map(int, sys.argv[1:])
    name_process(f"learning-rank{rank}")
    logs.configure(instance=f"learning-rank-{rank}")
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    learner = Learner(join(dist.TCPStore("127.0.0.1", port, size, is_master=False), rank, size))
    for line in sys.stdin:
        try:
            learner.run(LearnRequest.model_validate_json(line), TaskContext(emit=lambda event: None))
        except TaskError as error:
            reports.write(json.dumps({"reason": error.reason, "message": str(error), "retryable": error.retryable}))
            reports.flush()
            sys.exit(1)


if __name__ == "__main__":
    main()
