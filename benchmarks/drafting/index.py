"""The index that drafts are looked up in: time to build it, memory, and time of a look-up.

    python benchmarks/drafting/index.py [--responses 100000] [--tokens 2000] [--json FILE]

A look-up is for one sequence and for 128 at a time. All seconds are CPU seconds. Responses are random walks over a
vocabulary of 50,000, eight to a prompt, each a variation of its prompt's.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shared.records import described_run, write_record
from rlhfless_functions.data.draft_history import KnownResponse
from rlhfless_functions.generation.drafting.index import SEPARATOR, DraftIndex


def measure_index(responses: int, tokens: int) -> dict[str, Any]:
    """Build an index of so many responses and look sequences up in it."""
    numbers = np.random.default_rng(0)
    rows = 128
    index = DraftIndex(responses * (tokens + 17), rows, tokens + 32)
    seconds = 0.0
    newest: list[list[int]] = []
    for first in range(0, responses, 8):
        base = numbers.integers(0, 50_000, tokens)
        group = []
        for _ in range(min(8, responses - first)):
            changed = numbers.random(tokens) < 0.05
            group.append(np.where(changed, numbers.integers(0, 50_000, tokens), base).tolist())
        known = [KnownResponse(first // 8, [first % 1000 + number for number in range(16)], each) for each in group]
        began = time.process_time()
        index.add(known)
        seconds += time.process_time() - began
        newest = [*newest, *group][-rows:]
    prompts = np.array([(responses - len(newest) + number) // 8 for number in range(len(newest))])
    ends = []
    for row, response in enumerate(newest):
        start = int(index.starts[row])
        known_tokens = response[: tokens // 2]
        index.tokens[start : start + len(known_tokens) + 1] = [*known_tokens, SEPARATOR]
        ends.append(start + len(known_tokens))
    places = np.array(ends)

    def look_up_microseconds(sequences: int) -> float:
        times = []
        for _ in range(200):
            began = time.process_time()
            index.look_up(places[:sequences], prompts[:sequences])
            times.append(time.process_time() - began)
        return float(np.median(times)) * 1e6 / sequences

    found = index.look_up(places, prompts)[1]
    size = index.tokens.nbytes + index._tables.nbytes
    return {
        "responses": responses,
        "tokens": tokens,
        "build_seconds": seconds,
        "build_nanoseconds_a_token": seconds / (responses * tokens) * 1e9,
        "bytes": size,
        "bytes_a_token": size / (responses * tokens),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "look_up_microseconds_alone": look_up_microseconds(1),
        "look_up_microseconds_in_a_batch_of_128": look_up_microseconds(len(places)),
        "found": float((found > 0).mean()),
    }


def main() -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2_000)
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    found = measure_index(arguments.responses, arguments.tokens)
    result = {**described_run(["numpy", "torch"]), **found}
    write_record(result, arguments.json)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
