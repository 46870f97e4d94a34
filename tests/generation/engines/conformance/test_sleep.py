"""An engine that has given its memory back has what it held again as it was."""

from pathlib import Path

import pytest

from rlhfless_functions.generation.engines.base import Engine
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import LoraSettings
from tests.generation.engines.shares import (
    SAMPLING,
    generate,
    published_adapter,
    save_model,
    settings_of,
    share,
    version,
)


def test_after_a_sleep_the_same_request_gives_the_same_samples(engine: Engine, folder: Path) -> None:
    tasks = share(8, 2)
    before = generate(engine, tasks)
    for times in (1, 2):
        for _ in range(times):
            engine.sleep()
        engine.load(settings_of(folder), version(folder))
        assert generate(engine, tasks) == before


def test_a_version_that_comes_after_a_sleep_is_the_one_that_generates(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    later = save_model(tmp_path, folder, seed=7)
    tasks = share(8, 2)
    engine.load(settings_of(folder), version(later, 1))
    wanted = generate(engine, tasks)
    engine.load(settings_of(folder), version(folder))
    assert generate(engine, tasks) != wanted
    engine.sleep()
    engine.load(settings_of(folder), version(later, 1))
    assert generate(engine, tasks) == wanted


def test_an_adapter_generates_after_a_sleep_as_before(engine: Engine, folder: Path, tmp_path: Path) -> None:
    model = settings_of(folder, lora=LoraSettings(rank=4))
    adapted = version(folder, 1, adapter=str(published_adapter(folder, tmp_path / "adapter")))
    tasks = share(4, 2)
    engine.load(model, version(folder))
    plain = generate(engine, tasks)
    engine.load(model, adapted)
    with_adapter = generate(engine, tasks)
    assert with_adapter != plain
    for weights, wanted in ((adapted, with_adapter), (version(folder), plain)):
        engine.sleep()
        engine.load(model, weights)
        assert generate(engine, tasks) == wanted


def test_nothing_is_generated_between_a_sleep_and_the_next_load(engine: Engine) -> None:
    engine.start(share(2, 1), SAMPLING, None).step()
    engine.sleep()
    with pytest.raises(TaskError, match="no weights are loaded"):
        engine.start(share(2, 1), SAMPLING, None)
