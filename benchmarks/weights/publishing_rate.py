"""How fast a version of a 0.5B model is published in a folder, on a CPU.

    python benchmarks/weights/publishing_rate.py [--rounds 5] [--folder DIR] [--json FILE]

A random model in the shape of Qwen2.5-0.5B has its weights in float32, as a learner does, and publishes them in
bfloat16, 1.0 GB. One way is that of the learner: files of 250 MB, of which each is flushed to the disk while others are
written. The other writes one file, and flushes it at the end. They take turns. Files lie in the page cache when
they are flushed.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.shapes import SHAPES, make_model
from rlhfless_functions import artifacts
from rlhfless_functions.weights.saving import HUB_SHARD_BYTES, write_model


def in_several_files(policy: Any, uri: str) -> None:
    """Publish as the learner does."""
    with artifacts.publishing(uri) as publication:
        write_model(policy, publication.folder, torch.bfloat16, finish=publication.finish)


def in_one_file(policy: Any, uri: str) -> None:
    """Publish what is flushed once all is written."""
    with artifacts.publish(uri) as folder:
        write_model(policy, folder, torch.bfloat16, shard_bytes=HUB_SHARD_BYTES)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="the store; by default the folder of temporary files")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    policy = make_model(SHAPES["0.5b"], torch.float32, torch.device("cpu"), seed=1)
    seconds: dict[str, list[float]] = {"in several files": [], "in one file": []}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as store:
        for number in range(arguments.rounds + 1):
            for way, publish in (("in several files", in_several_files), ("in one file", in_one_file)):
                uri = str(Path(store, "version"))
                began = time.monotonic()
                publish(policy, uri)
                # What is made once, such as the configuration's files, is made in the first round.
                if number:
                    seconds[way].append(time.monotonic() - began)
                manifest = artifacts.manifest(uri)
                assert manifest is not None
                size = sum(entry.size for entry in manifest.files.values())
                shutil.rmtree(uri)
    found = {
        way: {
            "median_seconds": round(statistics.median(measured), 3),
            "gigabytes_per_second": round(size / statistics.median(measured) / 1e9, 2),
            "all_seconds": [round(each, 3) for each in measured],
        }
        for way, measured in seconds.items()
    }
    content = {
        "command": f"python benchmarks/weights/publishing_rate.py --rounds {arguments.rounds}",
        "bytes": size,
        **found,
    }
    print(json.dumps(content, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
