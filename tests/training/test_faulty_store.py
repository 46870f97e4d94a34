"""Whole jobs on an S3 store with faults of all kinds: each ends with the weights of the undisturbed run.

Some of them run as a user's. Many more run in this process (`functions_here`). `RLHFLESS_FAULTY_RUNS` is how many of
those the nightly test makes, and `RLHFLESS_FAULTY_FIRST` the seed of the first. Seeds freeze the faults of a request.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from botocore.exceptions import ResponseStreamingError
from safetensors.torch import load

from tests.artifacts.faulty_s3 import KINDS, faulty_store
from tests.command_line import run_command
from tests.training.whole_jobs import assert_equal_weights, final_weights, run_job

NIGHTLY_RUNS = int(os.environ.get("RLHFLESS_FAULTY_RUNS", "300"))
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


def environment_of(url: str) -> dict[str, str]:
    """The variables with which a job reaches a store."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def client_of(url: str) -> Any:
    """A client that tries again for long enough."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 10}),
    )


def weights_in_bucket(client: Any, bucket: str) -> dict[str, torch.Tensor]:
    """The last weights of the job in a bucket."""

    def read(key: str) -> bytes:
        while True:
            # This client tries a request again, and not the read of a body.
            with suppress(ResponseStreamingError):
                content: bytes = client.get_object(Bucket=bucket, Key=key)["Body"].read()
                return content

    status = json.loads(read("faulty/status.json"))
    assert status["phase"] == "Succeeded", status
    uri = status["weights"]["uri"].removeprefix(f"s3://{bucket}/")
    files = json.loads(read(f"{uri}/manifest.json"))["files"]
    return load(read(f"{uri}/{files['model.safetensors'].get('stored', 'model.safetensors')}"))


def run_on_faulty_store(file: Path, seed: int, folder: Path) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Run a job as a user does, on a faulty store of its own; its weights, and the faults that there were."""
    with faulty_store(seed) as (url, faults):
        client = client_of(url)
        client.create_bucket(Bucket=BUCKET)
        ended = subprocess.run(
            run_command(file, "--artifacts", f"s3://{BUCKET}"),
            env={**os.environ, **environment_of(url), "RLHFLESS_CACHE": str(folder / f"cache-{seed}")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
            check=False,
        )
        assert ended.returncode == 0, f"seed {seed}: {ended.stdout}"
        weights = weights_in_bucket(client, BUCKET)
    return weights, faults


@contextmanager
def store_of_many_jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Counter[str]]]:
    """A client of a faulty store for this process, and the faults that there were, once it has ended.

    The name of a bucket is a part of all its requests, and so it is a seed of their faults.
    """
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    with faulty_store(0) as (url, faults):
        for name, value in environment_of(url).items():
            monkeypatch.setenv(name, value)
        yield client_of(url), faults
    S3FileSystem.clear_instance_cache()


@pytest.mark.slow
def test_a_faulty_store_kills_no_job_and_changes_no_weights(
    undisturbed: dict[str, torch.Tensor], faulty_job: Path, tmp_path: Path
) -> None:
    weights, faults = run_on_faulty_store(faulty_job, 7, tmp_path)
    assert_equal_weights(undisturbed, weights)
    assert len(faults) >= len(KINDS) / 2, faults


@pytest.mark.nightly
@pytest.mark.timeout(0)
def test_a_faulty_store_kills_no_job_in_many_runs(
    undisturbed: dict[str, torch.Tensor], faulty_job: Path, artifact_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhfless_functions.rewards.scoring import RewardScorer
    from tests.training.functions_here import train_here

    failed: dict[int, str] = {}
    scorer = RewardScorer()
    with store_of_many_jobs(monkeypatch) as (client, faults):
        for seed in range(FIRST_SEED, FIRST_SEED + NIGHTLY_RUNS):
            bucket = f"{BUCKET}-{seed}"
            client.create_bucket(Bucket=bucket)
            try:
                asyncio.run(train_here(faulty_job, f"s3://{bucket}/faulty", scorer))
                assert_equal_weights(undisturbed, weights_in_bucket(client, bucket))
            except Exception as error:
                failed[seed] = f"{type(error).__name__}: {error}"
            print(f"seed {seed}: {failed.get(seed, 'the same weights')}", flush=True)
            empty(client, bucket)
            shutil.rmtree(artifact_cache, ignore_errors=True)
    scorer.close()
    assert failed == {}
    assert faults.keys() == set(KINDS)


def empty(client: Any, bucket: str) -> None:
    """Remove what a job has left in a bucket, which the store keeps in memory."""
    while found := client.list_objects_v2(Bucket=bucket).get("Contents"):
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": each["Key"]} for each in found]})
