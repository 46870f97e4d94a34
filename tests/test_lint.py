"""What the linters leave to tests: their hooks, and private names that nothing uses."""

import ast
import re
from pathlib import Path

import yaml

from tests.figures import python_files

REPOSITORY = Path(__file__).resolve().parents[1]


def test_pre_commit_runs_what_make_lint_runs() -> None:
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    made = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe[1].splitlines()]
    repositories = yaml.safe_load((REPOSITORY / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["entry"] for repository in repositories for hook in repository["hooks"]] == made


def test_a_module_uses_its_private_names() -> None:
    assert not [
        f"{file.relative_to(REPOSITORY)}: {name}"
        for file in python_files("operator", "functions", "benchmarks", "e2e")
        for text in [file.read_text()]
        for name in private_names(ast.parse(text))
        if len(re.findall(rf"\b{name}\b", text)) == 1
    ]


def private_names(module: ast.Module) -> set[str]:
    """The private names that a module gives at its top level, but for what a decorator takes."""
    names = set()
    for node in module.body:
        if isinstance(node, ast.Assign):
            names |= {each.id for each in node.targets if isinstance(each, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
            names.add(node.name)
    return {name for name in names if name.startswith("_") and name != "_"}
