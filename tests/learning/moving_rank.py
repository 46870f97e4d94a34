"""One of two learning ranks that take two steps, and may move their parts of the state in between.

python -m tests.learning.moving_rank FOLDER REQUESTS moved|stayed RANK; REQUESTS has a request in each line.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rlhfless_functions.api import LearnRequest
from rlhfless_functions.distributed.ranks import Seat, join
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.learning.offload import relocate
from rlhfless_functions.runtime.task import TaskContext


def main(folder: str, requests: str, moved: str, rank: str) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    learner = Learner(join(Seat(int(rank), 2, folder=folder)))
    for line in Path(requests).read_text().splitlines():
        learner.run(LearnRequest.model_validate_json(line), TaskContext(emit=lambda event: None))
        if moved == "moved":
            assert learner._state is not None
            # Held here: none of its memory may be given to anything else.
            before = [each.to_local() for each in learner._state.policy.parameters()]
            relocate(learner._state, torch.clone)
            after = {each.to_local().data_ptr() for each in learner._state.policy.parameters()}
            assert after.isdisjoint(each.data_ptr() for each in before if each.numel())


if __name__ == "__main__":
    main(*sys.argv[1:])
    dist.destroy_process_group()
    os._exit(0)  # Threads of the process group may outlive it, and an interpreter that shuts down would die of them.
