"""Bytes of the weights that change in a step, and the time to say and to apply the change.

    python benchmarks/weights/deltas.py [--steps 3] [--json FILE]

A model of 31 million parameters takes real steps of AdamW on random tokens, without warm-up, at 1e-6 and at the
quickstart's 2e-4. Each version is written in bfloat16 and in float32, and its delta against the one before is measured.
Seconds are of CPU time, since other processes may be at work.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shared.random_models import QWEN3_126_MB, random_qwen3
from benchmarks.shared.records import described_run, write_record

RATES = (1e-6, 2e-4)
DTYPES = ("bfloat16", "float32")
SAMPLES, TOKENS = 2, 64


def model(dtype: str, rate: float, steps: int) -> Iterator[dict[str, Any]]:
    """The delta of each version of the model of 126 MB after the first."""
    import torch

    from rlhfless_functions.artifacts.deltas import apply_delta, write_delta
    from rlhfless_functions.weights.saving import write_model

    policy = random_qwen3().float()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    with tempfile.TemporaryDirectory() as place:
        before: Path | None = None
        for step in range(1, steps + 1):
            tokens = torch.randint(3, QWEN3_126_MB["vocab_size"], (SAMPLES, TOKENS))
            policy(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            folder = Path(place, str(step))
            folder.mkdir()
            write_model(policy, folder, getattr(torch, dtype))
            new = folder / "model.safetensors"
            if before is not None:
                delta, made = Path(place, "delta"), Path(place, "made")
                began = time.process_time()
                worth = write_delta(before, new, delta)
                encoded = time.process_time()
                record = {"step": step, "bytes": new.stat().st_size, "worth": worth}
                record |= {"encode_cpu_seconds": round(encoded - began, 4)}
                if worth:
                    began = time.process_time()
                    apply_delta(before, delta, made)
                    record |= {"apply_cpu_seconds": round(time.process_time() - began, 4)}
                    record |= {"delta_bytes": delta.stat().st_size}
                    assert made.read_bytes() == new.read_bytes()
                before.unlink()
                yield record
            before = new


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {**described_run(("torch", "transformers", "pyarrow", "numpy")), "versions": []}
    for dtype in DTYPES:
        for rate in RATES:
            versions = list(model(dtype, rate, options.steps))
            print(dtype, rate, json.dumps(versions), flush=True)
            results["versions"].append({"dtype": dtype, "learning_rate": rate, "versions": versions})
    write_record(results, options.json)


if __name__ == "__main__":
    main()
