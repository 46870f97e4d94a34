"""What every engine must do, on the same shares: an engine that does not pass is none.

The engines are those that are installed: vLLM has an environment of its own, and `make test-vllm` runs the suite there.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from rlhfless_functions.generation.engines.base import Engine
from rlhfless_functions.generation.engines.choice import EngineChoice, make_engine
from rlhfless_functions.settings import EngineName, EngineSettings
from tests.generation.engines.shares import NewEngine, save_model, settings_of, version

torch.set_num_threads(1)


@pytest.fixture(scope="package", params=["transformers", "vllm"] if find_spec("vllm") else ["transformers"])
def name(request: pytest.FixtureRequest) -> EngineName:
    return request.param


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save_model(tmp_path_factory.mktemp("engine-model"), tiny_model)


@pytest.fixture(scope="package")
def new_engine(name: EngineName) -> NewEngine:
    return lambda: make_engine(EngineChoice(name, "the test says so"), EngineSettings(drafting="auto"))


@pytest.fixture(scope="package")
def kept_engine(new_engine: NewEngine) -> Engine:
    """One for all tests that need no fresh one: vLLM takes a while to start."""
    return new_engine()


@pytest.fixture
def engine(kept_engine: Engine, folder: Path) -> Engine:
    kept_engine.load(settings_of(folder), version(folder))
    return kept_engine


@pytest.fixture
def elsewhere(name: EngineName, new_engine: NewEngine, engine: Engine, folder: Path) -> Engine:
    """Where a share goes on after a cut; vLLM has one engine in a process, and so goes on there."""
    if name == "vllm":
        return engine
    other = new_engine()
    other.load(settings_of(folder), version(folder))
    return other
