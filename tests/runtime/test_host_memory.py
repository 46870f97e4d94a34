"""How much memory a container has left."""

from pathlib import Path

import pytest

from rlhfless_functions.runtime.host_memory import container_free_bytes


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("1000\n", "300\n", 700.0), ("1000", "1200", 0.0), ("max", "300", float("inf"))]
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, used: str, free: float) -> None:
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert container_free_bytes(tmp_path) == free


def test_without_a_control_group_there_is_no_limit(tmp_path: Path) -> None:
    assert container_free_bytes(tmp_path) == float("inf")
