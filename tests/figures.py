"""Figures of the code: `python -m tests.figures` (`make figures`).

It prints the rooms (modules and sub-packages), floors, arrows (imports) and circles of each package, lines by area, the
longest functions and files, and the share of docstrings whose first word makes a clause of them.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("rlhfless_operator", "rlhfless_functions")
AREAS = {"product": ("operator", "functions"), "tests": ("tests", "e2e"), "benchmarks": ("benchmarks",)}
_QUESTION = "what|which|why|how|where|when|who|whose|whom"
_CLAUSE = re.compile(
    rf"({_QUESTION}|of|that|(by|in|from|for|at|on|with|to|under|until|since|before|after) ({_QUESTION}))\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Docstring:
    """The docstring of a module, class, function or field."""

    file: Path
    line: int
    text: str

    @property
    def is_clause(self) -> bool:
        """Whether it begins as a subordinate clause: "What the …", "Of the …", "Whether … or …"."""
        sentence = re.split(r"(?<=[.;:])\s|\n\n", self.text.strip(), maxsplit=1)[0]
        weighs = sentence.startswith("Whether ") and re.search(r"\bor\b", sentence)
        return bool(_CLAUSE.match(sentence) or weighs)


@cache
def python_files(*folders: str) -> list[Path]:
    """The tracked Python files below some folders of the repository."""
    command = ["git", "ls-files", "-z", *(f"{folder}/*.py" for folder in folders)]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).exists()]


def docstrings(file: Path) -> Iterator[Docstring]:
    """All docstrings of a file, those below fields included."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                if (
                    isinstance(each, ast.Expr)
                    and isinstance(each.value, ast.Constant)
                    and isinstance(each.value.value, str)
                ):
                    yield Docstring(file, each.lineno, each.value.value)


def package_of(file: Path) -> str:
    """Package of a product file, such as `rlhfless_operator/training`."""
    parts = file.relative_to(ROOT).parts[1:]
    return "/".join(parts[:2] if len(parts) > 2 else parts[:1])


def floors(graph: grimp.ImportGraph, package: str) -> tuple[int, int, int, bool]:
    """Rooms, floors, arrows of a package's children, and whether they import each other in a circle."""
    rooms = sorted(graph.find_children(package))
    inside = {room: {room, *graph.find_descendants(room)} for room in rooms}
    owner = {module: room for room, modules in inside.items() for module in modules}
    below = {
        room: {
            owner[found]
            for module in modules
            for found in graph.find_modules_directly_imported_by(module)
            if found in owner
        }
        - {room}
        for room, modules in inside.items()
    }
    arrows = sum(map(len, below.values()))
    level: dict[str, int] = {}
    try:
        for room in TopologicalSorter(below).static_order():
            level[room] = 1 + max((level[each] for each in below[room]), default=0)
    except CycleError:
        return len(rooms), 0, arrows, True
    return len(rooms), max(level.values(), default=0), arrows, False


def _print_packages() -> None:
    graph = grimp.build_graph(*PRODUCT, cache_dir=None)
    print(f"{'package':45}{'rooms':>6}{'floors':>7}{'arrows':>7}  circles")
    for root in PRODUCT:
        for package in [root, *sorted(graph.find_children(root))]:
            rooms, up, arrows, circle = floors(graph, package)
            if rooms:
                print(f"{package:45}{rooms:6}{up:7}{arrows:7}  {'yes' if circle else 'none'}")
    modules = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(modules).prepare()
        print("circles of modules: none")
    except CycleError as error:
        print("a circle of modules:", " -> ".join(error.args[1]))


def _print_lines() -> None:
    for area, folders in AREAS.items():
        files = python_files(*folders)
        print(f"{area:11}{len(files):5} files {sum(len(file.read_text().splitlines()) for file in files):7} lines")
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    texts = [page.read_text() for page in pages]
    lines, words = sum(len(text.splitlines()) for text in texts), sum(len(text.split()) for text in texts)
    print(f"{'docs':11}{len(pages):5} pages {lines:7} lines, {words} words")


def _print_longest() -> None:
    functions: list[tuple[int, str]] = []
    lengths: list[tuple[int, str]] = []
    for file in python_files("operator", "functions"):
        text, name = file.read_text(), str(file.relative_to(ROOT))
        lengths.append((len(text.splitlines()), name))
        functions += [
            (node.end_lineno - node.lineno + 1, f"{name}:{node.name}")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
        ]
    for what, found in (("function", functions), ("file", lengths)):
        print(f"longest {what}s: " + ", ".join(f"{name} ({lines})" for lines, name in sorted(found, reverse=True)[:3]))


def _print_clauses() -> None:
    by_package: dict[str, list[bool]] = {}
    for file in python_files("operator", "functions"):
        by_package.setdefault(package_of(file), []).extend(each.is_clause for each in docstrings(file))
    print("docstrings that begin as a clause:")
    for package, clauses in sorted(by_package.items()):
        if clauses:
            print(f"  {package:43}{sum(clauses):4} of {len(clauses):4}  {100 * sum(clauses) / len(clauses):3.0f} %")


if __name__ == "__main__":
    _print_packages()
    _print_lines()
    _print_longest()
    _print_clauses()
