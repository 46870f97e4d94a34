"""The front page of each package names its rooms: the docstring of its `__init__.py`."""

import ast
import re
from pathlib import Path

import pytest

from tests.figures import ROOT, python_files

PACKAGES = sorted(file.parent for file in python_files("operator", "functions") if file.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_the_front_page_names_every_room_and_none_that_is_gone(package: Path) -> None:
    page = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    modules = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__"}
    rooms = modules | {file.parent.name for file in package.glob("*/__init__.py")}
    named = {name.removesuffix("/") for name in re.findall(r"`([a-z_]+/?)`", page)}
    assert rooms <= named, f"not named: {sorted(rooms - named)}"
    # A page may name other things as well, which its own code or its neighbours know.
    code = "".join(file.read_text() for file in package.parent.rglob("*.py") if file != package / "__init__.py")
    gone = {name for name in named - rooms if not re.search(rf"\b{name}\b", code)}
    assert not gone, f"named, but not there: {sorted(gone)}"
