"""Whole jobs on an S3 store with faults of all kinds: each ends with the weights of the undisturbed run.

`RLHFLESS_FAULTY_RUNS` is how many runs the nightly test makes, and `RLHFLESS_FAULTY_FIRST` the seed of the first. Seeds
freeze the faults of a request.
"""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from tests.artifacts.faulty_s3 import KINDS, faulty_store
from tests.command_line import run_command
from tests.training.whole_jobs import assert_equal_weights, final_weights, run_job

NIGHTLY_RUNS = int(os.environ.get("RLHFLESS_FAULTY_RUNS", "40"))
FIRST_SEED = int(os.environ.get("RLHFLESS_FAULTY_FIRST", "1000"))
BUCKET = "faulty"
SHORT = {
    "steps": 3,
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "checkpoints": {"everySteps": 2},
}

pytestmark = [pytest.mark.usefixtures("warm_start", "artifact_cache")]


@pytest.fixture(scope="module")
def undisturbed(shared_tiny_job: Callable[..., Path]) -> dict[str, torch.Tensor]:
    """The weights that the job comes to on a disk."""
    file = shared_tiny_job("undisturbed", **SHORT)
    run_job(file)
    return final_weights(file)


@pytest.fixture(scope="module")
def faulty_job(shared_tiny_job: Callable[..., Path]) -> Path:
    """The same job."""
    return shared_tiny_job("faulty", **SHORT)


def run_on_faulty_store(file: Path, seed: int, folder: Path) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Run a job on a faulty store of its own; its weights, and the faults that there were."""
    import boto3
    from botocore.config import Config

    with faulty_store(seed) as (url, faults):
        environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "RLHFLESS_CACHE": str(folder / f"cache-{seed}"),
        }
        client = boto3.client(
            "s3",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
            config=Config(retries={"max_attempts": 10}),
        )
        client.create_bucket(Bucket=BUCKET)
        ended = subprocess.run(
            run_command(file, "--artifacts", f"s3://{BUCKET}"),
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert ended.returncode == 0, f"seed {seed}: {ended.stdout}"

        def read(key: str) -> bytes:
            content: bytes = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            return content

        uri = json.loads(read("faulty/status.json"))["weights"]["uri"].removeprefix(f"s3://{BUCKET}/")
        files = json.loads(read(f"{uri}/manifest.json"))["files"]
        weights = load(read(f"{uri}/{files['model.safetensors'].get('stored', 'model.safetensors')}"))
    return weights, faults


def seeds(count: int, first: int) -> Iterator[int]:
    """The seeds of so many runs."""
    return iter(range(first, first + count))


@pytest.mark.slow
def test_a_faulty_store_kills_no_job_and_changes_no_weights(
    undisturbed: dict[str, torch.Tensor], faulty_job: Path, tmp_path: Path
) -> None:
    faults: Counter[str] = Counter()
    for seed in seeds(3, 7):
        weights, found = run_on_faulty_store(faulty_job, seed, tmp_path)
        assert_equal_weights(undisturbed, weights)
        faults += found
    assert len(faults) >= len(KINDS) - 1, faults


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_a_faulty_store_kills_no_job_in_many_runs(
    undisturbed: dict[str, torch.Tensor], faulty_job: Path, tmp_path: Path
) -> None:
    faults: Counter[str] = Counter()
    for seed in seeds(NIGHTLY_RUNS, FIRST_SEED):
        weights, found = run_on_faulty_store(faulty_job, seed, tmp_path)
        assert_equal_weights(undisturbed, weights)
        faults += found
        print(f"seed {seed}: {dict(found)}", flush=True)
    assert faults.keys() == set(KINDS)
