"""The artifact store goes away in mid-run: nothing is lost, and the job goes on from where it was."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from s3fs import S3FileSystem
from safetensors.torch import load

from rlhfless_functions.api import Failed
from rlhfless_operator.errors import StoreUnavailableError
from rlhfless_operator.job.reading.validation import load_job
from rlhfless_operator.local.local_run import run_locally
from rlhfless_operator.platforms.base import InstanceLostError, TaskFailedError
from rlhfless_operator.training.requests.tasks import StageFailedError, check_retry

BUCKET = "outage"


class Store:
    """A server that can go away; what it holds stays in this process."""

    def __init__(self) -> None:
        self.port = 0
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()
        _, self.port = self._server.get_host_and_port()

    def stop(self) -> None:
        self._server.stop()

    @staticmethod
    def client() -> Any:
        import boto3

        return boto3.client("s3")

    def read(self, key: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return content

    def status(self, name: str) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.read(f"{name}/status.json"))
        return status


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    store = Store()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store.client().create_bucket(Bucket=BUCKET)
    # fsspec keeps its connections, whatever the variables say by then.
    S3FileSystem.clear_instance_cache()
    yield store
    S3FileSystem.clear_instance_cache()
    store.stop()


def run_job(file: Path) -> dict[str, Any]:
    job = load_job(file).resolve_paths(file.parent)
    return asyncio.run(run_locally(job, f"s3://{BUCKET}/{job.metadata.name}", threads=1))


def stop_after_first_step(store: Store, name: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if store.status(name)["step"] >= 1:
                break
        except store.client().exceptions.NoSuchKey:
            pass
        time.sleep(0.02)
    store.stop()


def final_weights(store: Store, name: str) -> dict[str, torch.Tensor]:
    uri = store.status(name)["weights"]["uri"].removeprefix(f"s3://{BUCKET}/")
    return load(store.read(f"{uri}/model.safetensors"))


@pytest.mark.nightly
@pytest.mark.usefixtures("warm_start")
def test_a_job_goes_on_once_the_store_is_back(tiny_job: Callable[..., Path], store: Store) -> None:
    run_job(tiny_job("undisturbed", steps=4))
    file = tiny_job("disturbed", steps=4)
    stopper = threading.Thread(target=stop_after_first_step, args=(store, "disturbed"))
    stopper.start()
    with pytest.raises(StoreUnavailableError, match="the store did not answer as it should"):
        run_job(file)
    stopper.join()
    store.start()
    assert store.status("disturbed")["phase"] != "Failed"
    assert run_job(file)["steps"] == 4
    expected, found = final_weights(store, "undisturbed"), final_weights(store, "disturbed")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_instance_that_can_not_reach_the_store_fails_no_job() -> None:
    for reason in ("artifact_missing", "artifact_unwritable"):
        silent = TaskFailedError(Failed(reason=reason, message="the store did not answer", retryable=True))
        check_retry(silent, 1, 2, "learning")
        with pytest.raises(StoreUnavailableError, match="did not answer"):
            check_retry(silent, 3, 2, "learning")
    gone = TaskFailedError(Failed(reason="artifact_missing", message="no such file", retryable=False))
    with pytest.raises(StageFailedError, match="no such file"):
        check_retry(gone, 1, 2, "learning")
    with pytest.raises(StageFailedError, match="given up after 3 attempts"):
        check_retry(InstanceLostError("killed"), 3, 2, "learning")
