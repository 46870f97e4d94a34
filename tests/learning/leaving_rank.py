"""One of four ranks of two instances. The second one comes late to the end of a step; the first one ends it there.

python -m tests.learning.leaving_rank FOLDER PORT RANK; PORT is that of the store.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from rlhfless_functions.distributed.ranks import Seat, join


def main(folder: str, port: str, rank: str) -> None:
    torch.set_num_threads(1)
    ranks = join(Seat(int(rank), 4, of_instance=2, host="127.0.0.1", port=int(port), group="ranks", interface="lo"))
    process, exchanged = Path(folder, "process"), Path(folder, "exchanged")
    if ranks.rank == 1:
        process.write_text(str(os.getpid()))
    values = ranks.all(f"rank {ranks.rank}")
    if ranks.rank == 1:
        # It may still have to pass values on for as long as this.
        time.sleep(1)
        exchanged.touch()
    ranks.await_own()
    if ranks.rank == 0:
        assert exchanged.exists()
        os.kill(int(process.read_text()), signal.SIGKILL)
    print(", ".join(values), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # Threads of the process group may outlive it, and an interpreter that shuts down would die of them.
