"""Policies that compute while their weights arrive."""

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhfless_functions import artifacts
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings
from rlhfless_functions.weights import ArrivingPolicy, NotArrivedError, arriving_files, load_arriving, load_policy
from rlhfless_functions.weights import arriving as arriving_weights
from tests.artifacts.folders import publish
from tests.weights.random_models import CONFIGS, TOKENS, random_model, settings_of, version

CPU = torch.device("cpu")
CONVERTED = {"qwen3-moe"}
"""Families whose published tensors transformers converts."""


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def logits(policy: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return policy(input_ids=TOKENS).logits


@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(CONFIGS.keys() - CONVERTED))
def test_what_is_computed_meanwhile_is_what_a_whole_load_gives(family: str, dtype: str, tmp_path: Path) -> None:
    folder = random_model(CONFIGS[family], tmp_path / family)
    publish(f"memory://{tmp_path.name}/{family}", files_of(folder))
    whole = load_policy(settings_of(folder, dtype=dtype), version(folder))
    for uri in (str(folder), f"memory://{tmp_path.name}/{family}"):
        arriving = load_arriving(settings_of(uri, dtype=dtype), version(uri), CPU)
        assert arriving is not None
        early = logits(arriving.policy)
        assert arriving.settle(computed=True)
        assert torch.equal(early, logits(whole))
        assert {name: tensor.dtype for name, tensor in arriving.policy.state_dict().items()} == {
            name: tensor.dtype for name, tensor in whole.state_dict().items()
        }
        assert all(map(torch.equal, arriving.policy.state_dict().values(), whole.state_dict().values()))
        assert arriving.policy.generation_config.to_dict() == whole.generation_config.to_dict()


@pytest.mark.usefixtures("artifact_cache")
def test_shards_arrive_one_after_the_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = random_model(CONFIGS["llama"], tmp_path / "one")
    whole = load_policy(settings_of(folder), version(folder))
    whole.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    uri = f"memory://{tmp_path.name}/shards"
    publish(uri, files_of(tmp_path / "shards"))
    arriving = load_arriving(settings_of(uri), version(uri), CPU)
    assert arriving is not None
    early = logits(arriving.policy)
    assert arriving.settle(computed=True)
    assert torch.equal(early, logits(whole))


def test_weights_that_need_a_conversion_or_an_adapter_are_loaded_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = random_model(CONFIGS["qwen3-moe"], tmp_path / "moe")
    assert load_arriving(settings_of(folder), version(folder), CPU) is None
    assert "can't be used as they come" in caplog.text
    plain = random_model(CONFIGS["qwen3"], tmp_path / "plain")
    assert load_arriving(settings_of(plain, lora=LoraSettings(rank=4)), version(plain), CPU) is None


class Store:
    """A slow store with one folder, which a test lets through in parts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.copy = folder, folder.parent / "copy"
        self.copy.mkdir()
        self.arriving: artifacts.Arriving | None = None
        self.content = (folder / "model.safetensors").read_bytes()
        self._begun = threading.Event()
        self._end: Callable[[], Path] | None = None
        self._ends = threading.Event()

    def fetch(self, arriving: artifacts.Arriving) -> Path:
        self.arriving = arriving
        names = [path.name for path in self.folder.iterdir()]
        arriving.begins(self.copy, names)
        for name in set(names) - {"model.safetensors"}:
            (self.copy / name).write_bytes((self.folder / name).read_bytes())
            arriving.completed(name)
        self._begun.set()
        self._ends.wait()
        assert self._end is not None
        return self._end()

    def send(self, content: bytes) -> None:
        """The beginning of the weights' file is there; it is begun again if it was there before."""
        self._begun.wait()
        assert self.arriving is not None
        self.arriving.began("model.safetensors")
        (self.copy / "model.safetensors").write_bytes(content)
        self.arriving.grew("model.safetensors", len(content))

    def grow(self, length: int) -> None:
        """So many bytes of it are there."""
        assert self.arriving is not None
        with (self.copy / "model.safetensors").open("ab") as file:
            file.write(self.content[file.tell() : length])
        self.arriving.grew("model.safetensors", length)

    def end(self, how: Callable[[], Path] | None = None) -> None:
        """The folder is complete, or fetching it has failed."""
        self._end = how or (lambda: self.copy)
        self._ends.set()


def bytes_up_to(folder: Path, layer: str) -> int:
    """Length of the file's beginning that ends before the first tensor of a layer."""
    content = (folder / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:length])
    return length + min(value["data_offsets"][0] for name, value in header.items() if layer in name)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store(random_model(CONFIGS["qwen3"], tmp_path / "model"))
    monkeypatch.setattr(
        "rlhfless_functions.weights.arriving.arriving_folder", lambda uri, model: artifacts.Arriving(made.fetch)
    )
    return made


def load(store: Store) -> ArrivingPolicy:
    made = load_arriving(settings_of(store.folder), version(store.folder), CPU)
    assert made is not None
    return made


def test_a_layer_waits_for_its_own_tensors_alone(store: Store) -> None:
    begins_second = bytes_up_to(store.folder, "layers.1.")
    threading.Thread(target=store.send, args=(store.content[:begins_second],)).start()
    arriving = load(store)
    first_layer, second_layer = threading.Event(), threading.Event()
    layers = arriving.policy.model.layers  # type: ignore[union-attr]
    layers[0].register_forward_hook(lambda *_: first_layer.set())
    layers[1].register_forward_hook(lambda *_: second_layer.set())
    found: list[torch.Tensor] = []
    passing = threading.Thread(target=lambda: found.append(logits(arriving.policy)))
    passing.start()
    assert first_layer.wait(60)
    assert not second_layer.wait(0.2)
    store.grow(len(store.content))
    passing.join(60)
    store.end()
    assert arriving.settle(computed=True)
    assert torch.equal(found[0], logits(load_policy(settings_of(store.folder), version(store.folder))))


def test_what_was_computed_with_damaged_bytes_is_computed_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    damaged = bytearray(store.content)
    damaged[-100:] = bytes(100)
    threading.Thread(target=store.send, args=(bytes(damaged),)).start()
    arriving = load(store)
    wrong = logits(arriving.policy)
    store.send(store.content)
    store.end()
    assert not arriving.settle(computed=True)
    assert "of no use" in caplog.text
    whole = logits(load_policy(settings_of(store.folder), version(store.folder)))
    assert torch.equal(logits(arriving.policy), whole)
    assert not torch.equal(wrong, whole)


def test_a_pass_ends_when_a_file_is_begun_again_in_its_middle(store: Store) -> None:
    threading.Thread(target=store.send, args=(store.content[: bytes_up_to(store.folder, "layers.1.")],)).start()
    arriving = load(store)
    refused: list[Exception] = []

    def compute() -> None:
        try:
            logits(arriving.policy)
        except NotArrivedError as error:
            refused.append(error)

    passing = threading.Thread(target=compute)
    passing.start()
    store.send(store.content)
    passing.join(60)
    assert refused
    store.end()
    assert not arriving.settle(computed=False)
    whole = load_policy(settings_of(store.folder), version(store.folder))
    assert torch.equal(logits(arriving.policy), logits(whole))


def test_what_fetching_raises_is_raised_and_the_policy_is_of_no_use(store: Store) -> None:
    threading.Thread(target=store.send, args=(store.content,)).start()
    arriving = load(store)
    logits(arriving.policy)

    def fails() -> Path:
        raise artifacts.ArtifactCorruptError("it is damaged")

    store.end(fails)
    with pytest.raises(TaskError, match="it is damaged") as error:
        arriving.settle(computed=True)
    assert error.value.reason == "artifact_missing"
    assert arriving.failed


def test_a_layer_that_was_passed_over_makes_the_pass_be_computed_again(store: Store) -> None:
    threading.Thread(target=store.send, args=(store.content,)).start()
    arriving = load(store)
    with torch.inference_mode():
        arriving.policy.model(input_ids=TOKENS)  # type: ignore[operator]
    store.end()
    # The output layer has had no pass.
    assert not arriving.settle(computed=True)


def test_an_abandoned_policy_lets_its_pass_go(store: Store) -> None:
    threading.Thread(target=store.send, args=(store.content[: bytes_up_to(store.folder, "layers.1.")],)).start()
    arriving = load(store)
    begun, ended = threading.Event(), threading.Event()
    arriving.policy.model.layers[0].register_forward_hook(lambda *_: begun.set())  # type: ignore[union-attr]

    def compute() -> None:
        with pytest.raises(NotArrivedError):
            logits(arriving.policy)
        ended.set()

    threading.Thread(target=compute).start()
    assert begun.wait(60)
    arriving.abandon()
    assert ended.wait(60)
    assert arriving.failed
    store.end()


def test_an_abandoned_policy_is_written_no_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    exactly = arriving_files._exactly

    def held_up(*given: Any) -> torch.Tensor:
        reading.set()
        assert go_on.wait(60)
        return exactly(*given)

    monkeypatch.setattr(arriving_files, "_exactly", held_up)
    threading.Thread(target=store.send, args=(store.content,)).start()
    arriving = load(store)
    assert reading.wait(60)
    arriving.abandon()
    assert all(not tensor.numel() for tensor in arriving.policy.parameters())
    target, name = arriving._plan[0]
    target.data = torch.full(arriving._files._header("model.safetensors")[name].shape, 7.0)
    go_on.set()
    arriving._thread.join(60)
    assert not arriving._thread.is_alive()
    assert (target == 7.0).all(), "what has the memory now keeps it"
    store.end()


def test_a_policy_with_tensors_that_belong_to_no_layer_is_loaded_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = random_model(CONFIGS["qwen3"], tmp_path / "model")
    build_empty = arriving_weights.build_empty

    def with_one_more(*given: Any) -> Any:
        policy = build_empty(*given)
        policy.scale = torch.nn.Parameter(torch.ones(3))
        return policy

    monkeypatch.setattr(arriving_weights, "build_empty", with_one_more)
    save_file(load_file(folder / "model.safetensors") | {"scale": torch.zeros(3)}, folder / "model.safetensors")
    assert load_arriving(settings_of(folder), version(folder), CPU) is None
    assert "belong to no layer" in caplog.text


@pytest.mark.usefixtures("artifact_cache")
def test_a_tensor_of_another_shape_in_a_later_shard_is_told(tmp_path: Path) -> None:
    folder = random_model(CONFIGS["llama"], tmp_path / "one")
    load_policy(settings_of(folder), version(folder)).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    last = sorted((tmp_path / "shards").glob("*.safetensors"))[-1]
    tensors = load_file(last)
    name = sorted(tensors)[0]
    save_file(tensors | {name: torch.zeros(3)}, last)
    arriving = load_arriving(settings_of(tmp_path / "shards"), version(tmp_path / "shards"), CPU)
    assert arriving is not None
    with pytest.raises(NotArrivedError):
        logits(arriving.policy)
    with pytest.raises(TaskError, match=r"cannot be loaded|lacks"):
        arriving.settle()
    assert arriving.failed


@pytest.mark.usefixtures("artifact_cache")
def test_a_damaged_file_of_the_store_is_told_as_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    folder = random_model(CONFIGS["qwen3"], tmp_path / "model")
    uri = f"memory://{tmp_path.name}/damaged"
    publish(uri, files_of(folder))
    content = bytearray(fsspec.filesystem("memory").cat_file(f"{uri}/model.safetensors"))
    content[-10:] = bytes(10)
    fsspec.filesystem("memory").pipe_file(f"{uri}/model.safetensors", bytes(content))
    # A small file may be known to be damaged, and its copy be gone, before the model is built.
    with pytest.raises(TaskError, match="corrupt"):
        if (arriving := load_arriving(settings_of(uri), version(uri), CPU)) is None:
            load_policy(settings_of(uri), version(uri))
        else:
            arriving.settle()
