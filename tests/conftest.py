"""Fixtures that several modules share: stores with a real S3 server, a tiny model folder, and small jobs around it.

Every worker imports every test module before its first test. Heavy packages are imported in the test that needs them;
`test_imports.py` names these packages.
"""

import functools
import gc
import os
import string
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings

from tests import prerequisites
from tests.jobs import write_tiny_job
from tests.processes import living
from tests.warm_start.starting import PYTHON, start_server

# Before torch is first imported: the machine's cores are shared by the processes of the suite.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example fails for being slow: the cores may be busy with something else. By default the examples are few, and the
# same each time; those of CI are others each time, and it keeps what failed.
_ANY_SPEED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("rlhfless", _ANY_SPEED, derandomize=True, max_examples=50)
settings.register_profile("ci", _ANY_SPEED, derandomize=False, max_examples=100, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "rlhfless"))


def pytest_configure() -> None:
    prerequisites.check_required()


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    # Next to all that collection makes stays: to look through it for garbage again and again takes seconds.
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    prerequisites.fail_if_lacking(item)


_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of a moto server: the S3 protocol over real HTTP.

    It has a process of its own: vLLM looks at every object of its process, and those of Flask fail at that.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _S3_SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.stdin.close()


@pytest.fixture
def s3(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """URI of a fresh, empty bucket; the standard AWS variables point to its server."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


@pytest.fixture(params=["local", "file", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URI of an empty folder in each kind of artifact store."""
    match request.param:
        case "local":
            return str(tmp_path / "store")
        case "file":
            return f"file://{tmp_path}/store"
        case "memory":
            return f"memory://{uuid.uuid4().hex}"
        case _:
            return f"{request.getfixturevalue('s3')}/store"


@pytest.fixture(params=["memory", "s3"])
def remote_store(request: pytest.FixtureRequest) -> str:
    """URI of an empty folder in each kind of artifact store that is not the local disk."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return f"{request.getfixturevalue('s3')}/store"


@pytest.fixture
def artifact_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local copies of artifacts, the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RLHFLESS_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A program that starts what Python starts, with torch imported once for all tests of this process."""
    if sys.platform != "linux":
        yield sys.executable
        return
    with start_server(tmp_path_factory.mktemp("warm")) as program:
        yield str(program)


@pytest.fixture(scope="module")
def warm_start(warm_python: str) -> Iterator[None]:
    """The processes that this module's tests start have imported torch already, where that is not what they test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", warm_python)
        yield


@pytest.fixture
def cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that this test starts are those of a user, in a module whose others have a warm start."""
    monkeypatch.setattr(sys, "executable", PYTHON)


@pytest.fixture
def nothing_is_left_behind() -> Iterator[None]:
    """Fails a test whose processes outlive it."""
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    psutil.wait_procs(left, timeout=10)  # One that was killed may not have come to its end yet.
    assert living(left) == []


TINY_CHARACTERS = string.digits + string.ascii_letters[:40] + " +-*/=;#:\n?."


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: a random Qwen3 of 2 layers, float32, with a tokenizer of single characters."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny-model")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *TINY_CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)

    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_job(tiny_model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes a job file around the tiny model; see `write_tiny_job`."""
    return functools.partial(write_tiny_job, tmp_path, tiny_model)


@pytest.fixture(scope="module")
def shared_tiny_job(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes jobs like `tiny_job`, which are there for all tests of a module."""
    return functools.partial(write_tiny_job, tmp_path_factory.mktemp("jobs"), tiny_model)
