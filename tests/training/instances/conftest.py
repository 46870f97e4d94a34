"""What tests of instances share."""

import pytest

from tests.training.instances.timeline import MakeTimeline, Timeline


@pytest.fixture
def make_timeline(monkeypatch: pytest.MonkeyPatch) -> MakeTimeline:
    return lambda **options: Timeline(monkeypatch, **options)
