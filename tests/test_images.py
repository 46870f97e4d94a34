"""What the images are made of; that they run is e2e's to show."""

import re
import shutil
import sys
from importlib.machinery import SourceFileLoader
from importlib.metadata import requires
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
REMOVED = {"setuptools"}
"""What torch asks for to build C++ extensions; the Dockerfiles remove it with pip."""


def script(name: str, root: Path = ROOT) -> ModuleType:
    """A script of images/, loaded but not run."""
    loader = SourceFileLoader(f"images_{name}", str(root / "images" / name))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(root / "images"))
    try:
        loader.exec_module(module)
    finally:
        sys.path.remove(str(root / "images"))
    return module


def requirements(*extras: str) -> list[str]:
    found: list[str] = script("requirements.py").requirements((ROOT / "pyproject.toml").read_text(), list(extras))
    return found


def closure(wanted: list[str]) -> set[str]:
    """The normalized names of these requirements and all that they require here."""
    found: set[tuple[str, str]] = set()
    pending = [(Requirement(text), "") for text in wanted]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for chosen in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), chosen)
            if key not in found:
                found.add(key)
                pending += [(Requirement(text), chosen) for text in requires(requirement.name) or []]
    return {name for name, _ in found}


def test_the_operators_image_has_no_torch() -> None:
    assert not closure(requirements("operator")) & {"torch", "transformers", "pyarrow", "datasets"}


@pytest.mark.parametrize("extra", ["operator", "functions"])
def test_everything_in_an_image_is_pinned_by_the_lock(extra: str) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    locked = {canonicalize_name(re.split("==", line)[0]) for line in lines}
    assert closure(requirements(extra)) - REMOVED <= locked


def test_an_unknown_extra_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="no extra 'opreator', only"):
        requirements("opreator")


def test_tests_headers_and_other_services_are_trimmed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["numpy/core.py", "botocore/data/s3/a.json", "botocore/data/endpoints.json", "torch/bin/torch_shm_manager"]
    trimmed = ["numpy/lib/tests/t.py", "botocore/data/ec2/a.json", "torch/include/a.h", "torch/bin/protoc"]
    for name in (*kept, *trimmed):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    unused = [str(path.relative_to(tmp_path)) for path in script("trim.py").unused(tmp_path)]
    assert unused == ["botocore/data/ec2", "numpy/lib/tests", "torch/bin/protoc", "torch/include"]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The part of a checkout that images are made from, with one module of each package."""
    shutil.copytree(ROOT / "images", tmp_path / "images", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("operator", "functions"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text("x = 1\n")
    return tmp_path


def test_a_tag_changes_with_what_its_image_is_made_from_alone(checkout: Path) -> None:
    digest_of_inputs = script("build", checkout).digest_of_inputs
    operator, functions = digest_of_inputs("operator"), digest_of_inputs("functions")

    (checkout / "operator" / "__pycache__").mkdir()
    (checkout / "operator" / "__pycache__" / "module.pyc").write_text("compiled")
    assert digest_of_inputs("operator") == operator

    (checkout / "operator" / "module.py").write_text("x = 2\n")
    assert digest_of_inputs("operator") != operator
    assert digest_of_inputs("functions") == functions

    operator = digest_of_inputs("operator")
    (checkout / "functions" / "module.py").write_text("x = 2\n")
    assert digest_of_inputs("operator") != operator, "the operator's image has the functions' contract in it"
    assert digest_of_inputs("functions") != functions
