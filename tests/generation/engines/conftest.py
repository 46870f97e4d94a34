"""What tests of engines share."""

import pytest

from tests.generation.engines.emulated_runs import write_lengths


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = str(tmp_path_factory.mktemp("trace") / "trace.parquet")
    write_lengths(uri)
    return uri
