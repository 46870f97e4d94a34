"""Print a digest of the quickstart's weights after a few steps, to compare two versions of the code.

    python benchmarks/quickstart/bits.py

A change that must not change what is learnt prints the same line before and after, on the same machine. The job is
examples/quickstart/grpo.yaml with fewer steps, run with one thread (docs/reproducibility.md says why one).
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.shared.places import QUICKSTART


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="how many steps to train (default: 6)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job_folder = Path(folder) / "quickstart"
        shutil.copytree(QUICKSTART, job_folder)
        job = yaml.safe_load((job_folder / "grpo.yaml").read_text())
        job["spec"]["steps"] = arguments.steps
        (job_folder / "grpo.yaml").write_text(yaml.safe_dump(job))
        command = [
            sys.executable,
            "-m",
            "rlhfless_operator",
            "run",
            "grpo.yaml",
            "--threads",
            "1",
            "--artifacts",
            "runs",
        ]
        subprocess.run(command, cwd=job_folder, check=True, stdout=sys.stderr)
        weights = sorted((job_folder / "runs").glob("*/model/*.safetensors"))
        if not weights:
            raise SystemExit(f"the run left no weights below {job_folder / 'runs'}")
        digest = hashlib.sha256()
        for file in weights:
            digest.update(file.read_bytes())
        print(f"{digest.hexdigest()}  step {arguments.steps}, {', '.join(file.name for file in weights)}")


if __name__ == "__main__":
    main()
