"""The transformers engine with weights that are still on their way: its tokens, and what fails."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from rlhfless_functions import artifacts
from rlhfless_functions import weights as stored
from rlhfless_functions.artifacts import retrieval
from rlhfless_functions.generation.engines.base import SequenceResult
from rlhfless_functions.generation.engines.passes import ModelPasses
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.runtime.task import TaskError
from tests.artifacts.folders import publish
from tests.generation.engines.shares import SAMPLING, finish, generate, save_model, settings_of, share, version

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


@pytest.fixture(scope="module")
def whole(folder: Path) -> dict[tuple[int, int], SequenceResult]:
    """What an engine generates that has loaded everything first."""
    engine = TransformersEngine()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "load_arriving", lambda *_: None)
        engine.load(settings_of(folder), version(folder))
    return generate(engine, share(6, 2))


@pytest.fixture
def uri(folder: Path, tmp_path: Path, artifact_cache: Path) -> str:
    """The model as a published folder of an object store."""
    made = f"memory://{tmp_path.name}/model"
    publish(made, {path.name: path.read_bytes() for path in folder.iterdir()})
    return made


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The store sends only the beginning of weights until this is set."""
    memory = type(fsspec.filesystem("memory"))
    cat_file, let_through = memory.cat_file, threading.Event()

    def slow(self: fsspec.AbstractFileSystem, path: str, start: int = 0, end: int | None = None) -> bytes:
        if path.endswith("model.safetensors") and start:
            assert let_through.wait(60)
        return cat_file(self, path, start=start, end=end)

    monkeypatch.setattr(retrieval, "_RANGE", 16384)
    monkeypatch.setattr(memory, "cat_file", slow)
    yield let_through
    let_through.set()


def damage(uri: str) -> Callable[[], None]:
    """Change the end of the weights' file; returns what mends it."""
    memory, name = fsspec.filesystem("memory"), f"{uri}/model.safetensors"
    content = memory.cat_file(name)
    memory.pipe_file(name, content[:-8] + bytes(8))
    return lambda: memory.pipe_file(name, content)


@pytest.mark.parametrize("place", ["folder", "uri"])
def test_tokens_are_those_of_a_whole_load(
    place: str, request: pytest.FixtureRequest, whole: dict[tuple[int, int], SequenceResult]
) -> None:
    where = request.getfixturevalue(place)
    awaited, stepped = TransformersEngine(), TransformersEngine()
    for engine in (awaited, stepped):
        engine.load(settings_of(where), version(where))
    run = awaited.start(share(6, 2), SAMPLING, None)
    run.await_weights()
    assert {(result.prompt, result.index): result for result in finish(run)} == whole
    assert generate(stepped, share(6, 2)) == whole


def test_a_later_run_computes_its_prompts_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    prefill = ModelPasses._prefill

    def counted(self: ModelPasses, *arguments: Any) -> None:
        passes.append(len(arguments[0]))
        prefill(self, *arguments)

    engine = TransformersEngine()
    engine.load(settings_of(folder), version(folder))
    generate(engine, share(6, 2))
    monkeypatch.setattr(ModelPasses, "_prefill", counted)
    run = engine.start(share(6, 2), SAMPLING, None)
    run.await_weights()
    assert passes == []
    finish(run)
    assert passes == [12]


def test_prompts_with_nothing_to_prefill_wait_for_the_weights(uri: str, folder: Path) -> None:
    tasks = share(6, 2)
    short = [type(task)(task.prompt, task.index, task.prompt_tokens[:1], task.seed) for task in tasks]
    early, late = TransformersEngine(), TransformersEngine()
    early.load(settings_of(uri), version(uri))
    found = generate(early, short)
    late.load(settings_of(folder), version(folder))
    late.start(short, SAMPLING, None).await_weights()
    assert found == generate(late, short)


def test_nothing_is_sampled_with_damaged_weights_and_the_engine_mends(
    uri: str, whole: dict[tuple[int, int], SequenceResult]
) -> None:
    mend = damage(uri)
    engine = TransformersEngine()
    # A small model may be known to be damaged before the run is open.
    with pytest.raises(TaskError, match="corrupt") as error:
        engine.load(settings_of(uri), version(uri))
        engine.start(share(6, 2), SAMPLING, None).await_weights()
    assert error.value.reason == "artifact_missing"
    mend()
    engine.load(settings_of(uri), version(uri))
    assert generate(engine, share(6, 2)) == whole


@pytest.mark.parametrize("sound", [True, False])
def test_another_version_takes_the_place_of_weights_on_their_way(
    sound: bool, uri: str, folder: Path, whole: dict[tuple[int, int], SequenceResult], stalled: threading.Event
) -> None:
    engine = TransformersEngine()
    if not sound:
        damage(uri)
    engine.load(settings_of(folder), version(uri))
    stalled.set()
    engine.load(settings_of(folder), version(folder, 1))
    assert generate(engine, share(6, 2)) == whole


def test_another_model_waits_for_no_weights_on_their_way(
    uri: str, folder: Path, whole: dict[tuple[int, int], SequenceResult], stalled: threading.Event
) -> None:
    engine, loaded = TransformersEngine(), threading.Event()
    engine.load(settings_of(uri), version(uri))
    before = engine._loaded
    assert before is not None

    def load() -> None:
        engine.load(settings_of(folder), version(folder))
        loaded.set()

    threading.Thread(target=load, daemon=True).start()
    assert loaded.wait(60)
    assert not any(tensor.numel() for tensor in before.policy.parameters()), "one model is in memory"
    stalled.set()
    assert generate(engine, share(6, 2)) == whole


def test_a_load_tries_anew_after_weights_that_did_not_come(
    uri: str, whole: dict[tuple[int, int], SequenceResult], stalled: threading.Event
) -> None:
    engine = TransformersEngine()
    mend = damage(uri)
    engine.load(settings_of(uri), version(uri))
    stalled.set()
    with pytest.raises(artifacts.ArtifactCorruptError):
        artifacts.arrive(uri).result()
    mend()
    engine.load(settings_of(uri), version(uri))
    assert generate(engine, share(6, 2)) == whole


def test_the_tokenizer_of_a_damaged_folder_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, loaded = retrieval._check, threading.Event()

    def late(*given: Any) -> None:
        assert loaded.wait(60)
        check(*given)

    monkeypatch.setattr(retrieval, "_check", late)
    place = str(tmp_path / "published")
    publish(place, {path.name: path.read_bytes() for path in folder.iterdir()})
    configuration = Path(place, "tokenizer_config.json")
    sound = configuration.read_text()
    configuration.write_text(json.dumps(json.loads(sound) | {"eos_token": "7"}))
    engine = TransformersEngine()
    engine.load(settings_of(place), version(place))
    loaded.set()
    with pytest.raises(TaskError, match="manifest says"):
        engine.start(share(6, 2), SAMPLING, None).await_weights()
    engine.sleep()
    configuration.write_text(sound)
    engine.load(settings_of(place), version(place))
    assert engine._loaded is not None
    assert engine._loaded.tokenizer.eos_token == json.loads(sound)["eos_token"]


def test_a_model_whose_tokenizer_cannot_be_had_takes_no_memory(
    uri: str, monkeypatch: pytest.MonkeyPatch, stalled: threading.Event
) -> None:
    made: list[stored.ArrivingPolicy] = []
    load_arriving = stored.load_arriving

    def remembered(*given: Any) -> stored.ArrivingPolicy | None:
        made.extend(found for found in [load_arriving(*given)] if found is not None)
        return made[-1]

    def refuses(self: stored.ArrivingPolicy) -> None:
        raise TaskError("model_unloadable", "there is no tokenizer in it")

    monkeypatch.setattr(stored, "load_arriving", remembered)
    monkeypatch.setattr(stored.ArrivingPolicy, "load_tokenizer", refuses)
    with pytest.raises(TaskError, match="no tokenizer"):
        TransformersEngine().load(settings_of(uri), version(uri))
    assert not any(tensor.numel() for tensor in made[0].policy.parameters())
    stalled.set()


def test_a_sleep_abandons_weights_on_their_way(uri: str, whole: dict[tuple[int, int], SequenceResult]) -> None:
    engine = TransformersEngine()
    engine.load(settings_of(uri), version(uri))
    engine.sleep()
    engine.load(settings_of(uri), version(uri))
    assert generate(engine, share(6, 2)) == whole


def test_a_file_that_the_store_breaks_off_is_read_again(
    uri: str, whole: dict[tuple[int, int], SequenceResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    cat_file = type(memory).cat_file
    broken: list[str] = []

    def breaks(self: fsspec.AbstractFileSystem, path: str, *args: object, **kwargs: object) -> bytes:
        if path.endswith("model.safetensors") and not broken:
            broken.append(path)
            raise ConnectionResetError("the store is gone for a moment")
        return cat_file(self, path, *args, **kwargs)

    monkeypatch.setattr(type(memory), "cat_file", breaks)
    engine = TransformersEngine()
    engine.load(settings_of(uri), version(uri))
    assert generate(engine, share(6, 2)) == whole
    assert broken


def test_loading_does_not_wait_for_the_weights_themselves(
    uri: str, whole: dict[tuple[int, int], SequenceResult], stalled: threading.Event
) -> None:
    engine = TransformersEngine()
    engine.load(settings_of(uri), version(uri))
    stalled.set()
    assert generate(engine, share(6, 2)) == whole


def test_a_fresh_instance_that_ends_leaves_no_part_of_a_copy(uri: str, artifact_cache: Path) -> None:
    mend = damage(uri)
    with pytest.raises(artifacts.ArtifactCorruptError):
        artifacts.arrive(uri).result()
    assert [path for path in artifact_cache.iterdir() if path.is_dir()] == []
    mend()
