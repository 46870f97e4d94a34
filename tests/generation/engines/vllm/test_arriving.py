"""vLLM starts while its first weights are fetched, and nothing is sampled before they are there and checked."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsReference
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, ModelSettings, VllmSettings
from tests.artifacts.folders import publish
from tests.generation.engines.shares import assert_same, generate, save_model, settings_of, share, version
from tests.generation.engines.shares import folder as folder  # A fixture.

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from rlhfless_functions.generation.engines.vllm.arriving import ArrivingWeights
from rlhfless_functions.generation.engines.vllm.engine import VllmEngine
from rlhfless_functions.weights.source import read_config

torch.set_num_threads(1)
SETTINGS = EngineSettings(kv_budget_tokens=8192, sequence_tokens=1024)


class Store:
    """A store that has sent all of a folder but the last byte of a file of its weights, until a test lets it go on."""

    def __init__(self, folder: Path, copy: Path) -> None:
        self.folder, self.copy = folder, copy
        self.copy.mkdir()
        self.wanted, self.goes_on = threading.Event(), threading.Event()
        self.fails = False
        self.begun_again = 0

    def fetch(self, arriving: artifacts.Arriving) -> Path:
        self.begun_again += 1
        names = sorted((path.name for path in self.folder.iterdir()), key=lambda name: name.endswith(".safetensors"))
        arriving.begins(self.copy, names)
        for name in names:
            shutil.copyfile(self.folder / name, self.copy / name)
            arriving.grew(name, (self.copy / name).stat().st_size - 1)
            if name.endswith(".safetensors"):
                assert self.goes_on.wait(120)
            if self.fails:
                error = artifacts.ArtifactMissingError("the store does not answer")
                error.retryable = True
                raise error
            arriving.completed(name)
        return self.copy


@pytest.fixture
def store(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store(folder, tmp_path / "copy")
    monkeypatch.setattr(
        "rlhfless_functions.generation.engines.vllm.arriving.arriving_folder",
        lambda uri, model: artifacts.Arriving(made.fetch),
    )
    wait_for = artifacts.Arriving.wait_for

    def waits(arriving: artifacts.Arriving, name: str) -> None:
        if name.endswith(".safetensors"):
            made.wanted.set()
        wait_for(arriving, name)

    monkeypatch.setattr(artifacts.Arriving, "wait_for", waits)
    return made


@pytest.fixture
def engine() -> Any:
    made = VllmEngine(SETTINGS)
    yield made
    made.close()


def reference(folder: Path) -> Any:
    engine = TransformersEngine()
    engine.load(settings_of(folder), version(folder))
    return generate(engine, share(4, 2))


def beside(load: Callable[[], None], then: Callable[[], None]) -> BaseException | None:
    """Load in this thread while another one waits for what it does; returns the error."""
    thread = threading.Thread(target=then)
    thread.start()
    try:
        load()
    except TaskError as error:
        return error
    finally:
        thread.join()
    return None


def test_vllm_builds_the_model_before_the_weights_are_there(
    engine: VllmEngine, store: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def let_go_on() -> None:
        found.append(store.wanted.wait(120))
        store.goes_on.set()

    assert beside(lambda: engine.load(settings_of(folder), version(folder)), let_go_on) is None
    assert found == [True], "vLLM has asked for a file that was not there yet"
    assert_same(generate(engine, share(4, 2)), reference(folder))
    # The next version replaces them in place, as always.
    monkeypatch.undo()
    other = save_model(tmp_path / "other", folder, seed=7, max_position_embeddings=1024)
    engine.load(settings_of(folder), version(other, 1))
    assert_same(generate(engine, share(4, 2)), reference(other))


def test_a_download_that_fails_is_told_and_the_next_start_fetches_again(
    engine: VllmEngine, store: Store, folder: Path
) -> None:
    def fail() -> None:
        assert store.wanted.wait(120)
        store.fails = True
        store.goes_on.set()

    error = beside(lambda: engine.load(settings_of(folder), version(folder)), fail)
    assert isinstance(error, TaskError)
    assert (error.reason, error.retryable) == ("artifact_missing", True)
    assert "the store does not answer" in str(error)
    with pytest.raises(TaskError, match="no weights are loaded"):
        generate(engine, share(1, 1))
    store.fails = False
    engine.load(settings_of(folder), version(folder))
    assert store.begun_again == 2
    assert_same(generate(engine, share(4, 2)), reference(folder))


@pytest.mark.usefixtures("artifact_cache")
def test_shards_come_one_after_the_other(engine: VllmEngine, folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="40KB")
    assert len([*(tmp_path / "shards").glob("*.safetensors")]) > 2
    uri = f"memory://{tmp_path.name}/shards"
    files = {path.name: path.read_bytes() for path in [*folder.iterdir(), *(tmp_path / "shards").iterdir()]}
    publish(uri, {name: content for name, content in files.items() if name != "model.safetensors"})
    settings = ModelSettings(source=uri, dtype="float32")
    engine.load(settings, WeightsReference(version=0, uri=uri))
    assert_same(generate(engine, share(4, 2)), reference(folder))


@pytest.mark.usefixtures("artifact_cache")
def test_a_damaged_file_is_told_wherever_it_is(engine: VllmEngine, folder: Path, tmp_path: Path) -> None:
    uri = f"memory://{tmp_path.name}/damaged"
    for place in (str(tmp_path / "damaged"), uri):
        publish(place, {path.name: path.read_bytes() for path in folder.iterdir()})
        filesystem, path = fsspec.core.url_to_fs(f"{place}/model.safetensors")
        content = filesystem.cat_file(path)
        filesystem.pipe_file(path, content[:-10] + bytes(10))
        with pytest.raises(TaskError, match=r"corrupt|checksum"):
            engine.load(ModelSettings(source=place, dtype="float32"), WeightsReference(version=0, uri=place))
    with pytest.raises(TaskError, match="no weights are loaded"):
        generate(engine, share(1, 1))


def weights_of(folder: Path, name: str, settings: EngineSettings = SETTINGS) -> ArrivingWeights:
    """Weights of a fresh start, from a store that is asked only now."""
    uri = f"memory://{name}"
    publish(uri, {path.name: path.read_bytes() for path in folder.iterdir()})
    made = ArrivingWeights(uri, ModelSettings(source=uri, dtype="float32"))
    made.prepare(read_config(made.folder, uri), settings)
    return made


@pytest.mark.usefixtures("artifact_cache")
def test_vllm_waits_for_all_files_where_it_would_do_something_else_without_them(folder: Path, tmp_path: Path) -> None:
    name = tmp_path.name
    assert not weights_of(folder, f"{name}/plain").is_whole
    for case, given in {
        "parallel": VllmSettings(tensor_parallel_size=2),
        "format": VllmSettings(extra_args={"load-format": "safetensors"}),
        "quantized": VllmSettings(quantization="fp8"),
    }.items():
        weights = weights_of(folder, f"{name}/{case}", SETTINGS.model_copy(update={"vllm": given}))
        assert weights.is_whole, case
        assert (weights.folder / "model.safetensors").is_file()
    tied = save_model(tmp_path / "other", folder, seed=3, tie_word_embeddings=True)
    assert not weights_of(tied, f"{name}/tied").is_whole
    tensors = load_file(tied / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tied / "model.safetensors", metadata={"format": "pt"})
    assert weights_of(tied, f"{name}/head").is_whole
