"""Schemas of tools: made by transformers once, and kept for the next actor."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.environments import schemas as made
from rlhfless_functions.environments.schemas import schemas
from rlhfless_functions.environments.user_code import UserCode, load
from rlhfless_functions.rewards.source import SourceError

TOOL = '''
class Door:
    def turn(self, degrees: {kind}) -> str:
        """Turn the handle{more}.

        Args:
            degrees: how far.
        """
        return ""
'''


NUMBERS = itertools.count()


def code_of(folder: Path, kind: str = "int", more: str = "") -> UserCode:
    # A host runs a file once.
    number = next(NUMBERS)
    file = folder / f"door{number}.py"
    file.write_text(TOOL.format(kind=kind, more=more))
    return load({"file": str(file), "text": None, "class": "Door", "number": number}, [], folder)


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was made anew. The forks find transformers imported."""
    import transformers.utils  # noqa: F401 - a test that needs it imports it

    monkeypatch.setattr(sys, "path", list(sys.path))
    found: list[Any] = []
    make = made._made_in_a_fork

    def noted(tools: Any) -> Any:
        found.append(tools)
        return make(tools)

    monkeypatch.setattr(made, "_made_in_a_fork", noted)
    return found


def test_schemas_are_made_once_and_anew_for_anything_else(tmp_path: Path, forks: list[Any]) -> None:
    first = schemas(code_of(tmp_path), tmp_path)
    assert first[0]["function"]["parameters"]["properties"]["degrees"] == {"type": "integer", "description": "how far."}
    assert schemas(code_of(tmp_path), tmp_path) == first
    assert len(forks) == 1
    other = schemas(code_of(tmp_path, kind="float"), tmp_path)
    assert other[0]["function"]["parameters"]["properties"]["degrees"]["type"] == "number"
    assert (
        schemas(code_of(tmp_path, more=" of the door"), tmp_path)[0]["function"]["description"]
        != (first[0]["function"]["description"])
    )
    assert len(forks) == 3


@pytest.mark.parametrize("content", ["", "[", "{}x", "{}", "[]", "[7]", '[{"function": {"name": "other"}}]'])
def test_a_damaged_file_is_made_anew(tmp_path: Path, forks: list[Any], content: str) -> None:
    first = schemas(code_of(tmp_path), tmp_path)
    (kept,) = tmp_path.glob("tool-schemas-*.json")
    kept.write_text(content)
    assert schemas(code_of(tmp_path), tmp_path) == first
    assert len(forks) == 2
    assert [path.name for path in tmp_path.glob(".tool-schemas*")] == []


def test_nothing_is_kept_without_a_folder_or_of_a_tool_without_a_schema(tmp_path: Path, forks: list[Any]) -> None:
    assert schemas(code_of(tmp_path), None) == schemas(code_of(tmp_path), tmp_path / "missing")
    assert len(forks) == 2
    for _ in range(2):
        with pytest.raises(SourceError, match="tool 'turn' has no schema"):
            schemas(code_of(tmp_path, kind="'Nobody'"), tmp_path)
    assert list(tmp_path.glob("tool-schemas-*")) == []


@pytest.mark.parametrize("module", ["rlhfless_functions.environments.worker", "rlhfless_functions.rewards.worker"])
def test_a_worker_imports_nothing_heavy(module: str) -> None:
    """One starts for each actor, or anew after each kill, and is forked for each episode."""
    look = f"import sys, {module}; print({{'torch', 'numpy', 'pydantic', 'transformers'}} & sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "set()\n"
