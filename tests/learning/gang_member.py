"""One instance of a gang: takes each request of a file in its turn, and says what each came to in a line of JSON.

python -m tests.learning.gang_member REQUESTS [VERSION]; REQUESTS has a request in each line. VERSION is what it says
that its rlhfless is.
"""

import json
import os
import sys
from pathlib import Path

import torch

from rlhfless_functions.api import LearnRequest
from rlhfless_functions.learning import meeting
from rlhfless_functions.learning.learner import Learner
from rlhfless_functions.runtime.task import TaskContext, TaskError


def main(requests: str, version: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    if version is not None:
        true = meeting.versions()
        meeting.versions = lambda: true | {"rlhfless": version}
    learner = Learner()
    for line in Path(requests).read_text().splitlines():
        try:
            result = learner.run(LearnRequest.model_validate_json(line), TaskContext(emit=lambda event: None))
            said = {"metrics": result.metrics}
        except TaskError as error:
            said = {"error": str(error), "reason": error.reason, "retryable": error.retryable}
        print(json.dumps(said), flush=True)
    learner.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Threads of the process group may outlive it, and an interpreter that shuts down would die of them.
