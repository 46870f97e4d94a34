"""The learner's settings `pack` and `compile`: time of an update on this machine's CPU, as ratios.

    python benchmarks/learner/settings.py [--sizes small,medium,large,long] [--updates 5] [--threads 1] [--json FILE]

One process takes the same updates with each setting in turn, on the batches of `peers/learner.py` and on one of long
responses. The least processor time of several updates counts, as other work on the machine disturbs it least. The first
update, which compiles, is told apart. The gradient's norm must be the same with all settings.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.learner.batches import learn_request, longest_sequence, prepared_samples
from benchmarks.peers.learner import LEARNING_RATE, SIZES, Size, samples_of, save_model
from benchmarks.shared.records import described_run, write_record

ALL = {
    **SIZES,
    "long": Size(hidden=256, layers=4, vocabulary=16_384, groups=2, prompt=192, response=1500, micro_batch=8),
}
VARIANTS: dict[str, tuple[dict[str, Any], float]] = {
    "padded": ({"pack": "never"}, 1),
    "packed": ({"pack": "always"}, 1),
    "packed, a quarter of the rows' length": ({"pack": "always"}, 1 / 4),
    "compiled": ({"compile": True}, 1 / 4),
    "checkpointed": ({"pack": "never", "gradient_checkpointing": True}, 1),
    "compiled, checkpointed": ({"compile": True, "gradient_checkpointing": True}, 1 / 4),
}
"""Fields of `LearningSettings`, and the micro-batches' tokens relative to those of `peers/learner.py`."""


def measure(size: Size, updates: int) -> dict[str, Any]:
    """All settings on one batch."""
    from rlhfless_functions.learning.batch import TrainingBatch
    from rlhfless_functions.learning.state import initial_state
    from rlhfless_functions.learning.step import train_step

    samples = samples_of(size)
    prepared = prepared_samples(samples)
    whole = size.micro_batch * longest_sequence(samples, size.response)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    first: dict[str, float] = {}
    norms: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        save_model(size, Path(folder))
        states = {}
        for name, (learning, part) in VARIANTS.items():
            request = learn_request(
                Path(folder),
                samples,
                response=size.response,
                microbatch_tokens=int(part * whole),
                learning_rate=LEARNING_RATE,
                total_steps=updates,
                model={"dtype": "float32"},
                learning=learning,
            )
            states[name] = request, initial_state(request)
        for step in range(1, updates + 1):
            for name, (request, state) in states.items():
                began, began_cpu = time.perf_counter(), time.process_time()
                batch = TrainingBatch(prepared, request.algorithm, step)
                report = train_step(state, batch, request, step, lambda: None)
                seconds[name].append(time.process_time() - began_cpu)
                first.setdefault(name, time.perf_counter() - began)
                norms.setdefault(name, report.policy.gradient_norms[0])
    if max(norms.values()) - min(norms.values()) > 1e-3 * max(norms.values()):
        raise SystemExit(f"the settings do not take the same update: gradient norms {norms}")
    least = {name: min(taken[1:]) for name, taken in seconds.items()}
    return {
        "time_ratio": {name: taken / least["padded"] for name, taken in least.items()},
        "first_update_seconds": first,
        "cpu_seconds": seconds,
    }


def main() -> None:
    """Measure, print and keep the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join(ALL), help="some of small, medium, large and long")
    parser.add_argument("--updates", type=int, default=5, help="with each setting, the first of which does not count")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    result = {
        "sizes": {name: measure(ALL[name], arguments.updates) for name in arguments.sizes.split(",")},
        "threads": arguments.threads,
        **described_run(("torch", "transformers")),
    }
    print(json.dumps(result, indent=2))
    write_record(result, arguments.json)


if __name__ == "__main__":
    main()
