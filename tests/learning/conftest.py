"""The job that the learner's tests have where they name no other."""

from pathlib import Path

import pytest

from rlhfless_functions.settings import AlgorithmSettings, KlSettings, ModelSettings
from tests.learning.jobs import Job


@pytest.fixture
def model(tiny_model: Path) -> ModelSettings:
    return ModelSettings(source=str(tiny_model), dtype="float32")


@pytest.fixture
def job(tmp_path: Path, model: ModelSettings) -> Job:
    return Job(tmp_path, model, AlgorithmSettings(kl=KlSettings(coefficient=0.01)))
