"""Which way imports point: the contracts of `make lint` hold, and each of them notices the import that it forbids."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
AGAINST = {
    "A package of the functions imports only what is below it": (
        "functions/rlhfless_functions/weights/source.py",
        "import rlhfless_functions.learning.step",
    ),
    "A package of the operator imports only what is below it": (
        "operator/rlhfless_operator/platforms/base.py",
        "import rlhfless_operator.training.loop",
    ),
    "The functions know nothing of the operator": (
        "functions/rlhfless_functions/serving/server.py",
        "import rlhfless_operator.job.spec",
    ),
    "The operator imports no torch, nor what needs it": (
        "operator/rlhfless_operator/report/page.py",
        "import torch",
    ),
    "The wire contract and the settings are light": (
        "functions/rlhfless_functions/settings/base.py",
        "import numpy",
    ),
    "The planner has no I/O and no clock": (
        "operator/rlhfless_operator/planner/warming.py",
        "import time",
    ),
}

HEAVY = {"accelerate", "boto3", "datasets", "mlflow", "moto", "pandas", "tensorboard", "trl", "vllm", "wandb"}
"""Packages that take a while to import and that few tests need."""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the packages and of the contracts."""
    for package in ("functions/rlhfless_functions", "operator/rlhfless_operator"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def broken_contracts(sources: Path) -> set[str]:
    """The contracts that `lint-imports` calls broken."""
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    found = f"import sys; sys.path[:0] = ['functions', 'operator']; {command}"
    ended = subprocess.run([sys.executable, "-c", found], cwd=sources, capture_output=True, text=True, check=False)
    broken = {line.split(" BROKEN")[0] for line in ended.stdout.splitlines() if " BROKEN" in line}
    assert "Analyzed" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == bool(broken)
    return broken


def add_import(sources: Path, file: str, line: str) -> None:
    with (sources / file).open("a") as module:
        module.write(f"\n\ndef _late() -> None:\n    {line}\n")


def test_every_contract_holds(sources: Path) -> None:
    assert broken_contracts(sources) == set()


@pytest.mark.parametrize("contract", AGAINST)
def test_an_import_against_the_direction_is_noticed(sources: Path, contract: str) -> None:
    add_import(sources, *AGAINST[contract])
    assert contract in broken_contracts(sources)


def test_a_new_package_has_to_say_where_it_stands(sources: Path) -> None:
    package = sources / "operator" / "rlhfless_operator" / "newcomer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert broken_contracts(sources) == {"A package of the operator imports only what is below it"}


def imported_on_collection(tree: ast.AST) -> set[str]:
    """The packages that are imported with a module, outside of functions and of what is for type checkers only."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Import(names):
                found |= {alias.name.partition(".")[0] for alias in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case _:
                found |= imported_on_collection(node)
    return found


def test_heavy_packages_are_imported_in_the_tests_that_need_them() -> None:
    files = (ROOT / "tests").rglob("*.py")
    heavy = {str(file.relative_to(ROOT)): imported_on_collection(ast.parse(file.read_text())) & HEAVY for file in files}
    assert {file: packages for file, packages in heavy.items() if packages} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import trl.trainer", {"trl"}),
        ("from trl.trainer import utils", {"trl"}),
        ("try:\n    import trl\nexcept ImportError:\n    pass", {"trl"}),
        ("class Fields:\n    import trl", {"trl"}),
        ("def test() -> None:\n    import trl", set()),
        ("if TYPE_CHECKING:\n    import trl", set()),
        ("from . import trl", set()),
    ],
)
def test_an_import_is_heavy_where_collection_runs_it(text: str, expected: set[str]) -> None:
    assert imported_on_collection(ast.parse(text)) == expected
