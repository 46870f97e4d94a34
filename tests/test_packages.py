"""The front page of each package names its rooms."""

import ast
import re
from pathlib import Path

import pytest

from tests.figures import ROOT, python_files

PACKAGES = sorted(file.parent for file in python_files("operator", "functions") if file.name == "__init__.py")


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: str(package.relative_to(ROOT)))
def test_the_front_page_names_every_room_and_no_other(package: Path) -> None:
    page = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    named = {name.removesuffix("/") for name in re.findall(r"`([a-z_]+/?)`", page)}
    modules = {file.stem for file in package.glob("*.py")} - {"__init__", "__main__"}
    rooms = modules | {file.parent.name for file in package.glob("*/__init__.py")}
    assert rooms <= named, f"not named: {sorted(rooms - named)}"
