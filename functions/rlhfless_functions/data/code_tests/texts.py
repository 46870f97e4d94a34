"""Tests that are Python text: which functions of a text are its tests, and whether they can fail.

A text that only defines something passes whatever the code does. So each test must be able to fail, and must use
something of the code.
"""

import ast
import builtins
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cache

from rlhfless_functions.data.code_tests.units import TestsError, Unit

_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
CODE_MODULE = "solution"
"""Module from which a test imports the code's names."""
_SKIPPED = {"skip", "skipif", "skipIf", "skipUnless", "xfail", "expectedFailure"}
_FAILS = {"raises", "fail", "exit"}
_REPLACED = {"stdin", "stdout", "stderr", "argv"}


def units_of(texts: Sequence[str], setup: str, entry: str | None) -> list[Unit]:
    """Return the tests of texts, which share nothing but the setup.

    Texts that can't fail and stand before all tests are setup too. Empty texts are left out.

    Args:
        texts: Python texts.
        setup: text that runs before each.
        entry: expression for the function under test, for HumanEval's `check`.

    Raises:
        TestsError: a text can't be run as a test.
    """
    before = [setup] if setup.strip() else []
    units: list[Unit] = []
    for number, text in enumerate(texts, start=1):
        shown = f"test {number} ({' '.join(text.split()):.60})"
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError) as error:
            raise TestsError(f"{shown} is not Python ({error}); correct it") from None
        if not [node for node in tree.body if not _is_text(node)]:
            continue
        whole, runs = _parsed("\n".join([*before, text]))
        _check_runnable(whole, shown)
        found = _units(whole, runs, entry, shown)
        if found:
            units += found
        elif units or all(isinstance(node, ast.Expr) for node in tree.body):
            raise TestsError(f"{shown} asserts nothing, so that any code passes it; write assert {_example(tree)}")
        else:
            before.append(text)
    if not units:
        raise TestsError("the tests assert nothing, so that any code passes them; write assert statements")
    return units


def _parsed(text: str) -> tuple[ast.Module, str]:
    """Return a text with every comparison that stands alone asserted, as a tree and as text."""
    asserting = _AssertComparisons()
    tree = asserting.visit(ast.parse(text))
    return tree, ast.unparse(ast.fix_missing_locations(tree)) if asserting.changed else text


def _example(tree: ast.Module) -> str:
    return f"{ast.unparse(tree.body[-1]):.40} == ..." if isinstance(tree.body[-1], ast.Expr) else "f(1) == 2"


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


class _AssertComparisons(ast.NodeTransformer):
    """Asserts comparisons that stand alone: nothing else can be meant."""

    changed = False

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        logical = isinstance(node.value, ast.Compare | ast.BoolOp) or (
            isinstance(node.value, ast.UnaryOp) and isinstance(node.value.op, ast.Not)
        )
        if not logical:
            return node
        self.changed = True
        return ast.copy_location(ast.Assert(test=node.value, msg=None), node)


def _units(tree: ast.Module, text: str, entry: str | None, shown: str) -> list[Unit]:
    """Return the tests of one text, in pytest's, unittest's, HumanEval's or a script's form; none if it can't fail."""
    functions = {node.name: node for node in tree.body if isinstance(node, _FUNCTION)}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    main = [node for node in tree.body if _is_main(node)]
    outside = [node for node in tree.body if not isinstance(node, ast.ClassDef | _FUNCTION) and node not in main]
    failing = _Failing(functions)
    uses_code = bool(_names_of_the_code(tree)) or entry is not None
    tests = [name for name in functions if name.startswith("test")]
    called = {node.id for each in outside for node in ast.walk(each) if isinstance(node, ast.Name)}
    if uses_code and (any(name not in called for name in tests) or _test_classes(classes)):
        found: list[Unit] = []
        for name in tests:
            function = functions[name]
            if name not in called and failing.function(function) and not _is_skipped(function):
                _check_parameters(function, (), shown)
                found.append({"kind": "function", "text": text, "name": name})
        for owner, methods in _test_classes(classes).items():
            for method in methods:
                if failing.function(method) and not _is_skipped(method):
                    _check_parameters(method, ("self", "cls"), shown)
                    found.append({"kind": "method", "text": text, "owner": owner, "name": method.name})
        return found
    check = functions.get("check")
    if check is not None and "check" not in called and not main and len(check.args.args) == 1:
        return _checked(text, check, failing, entry, shown)
    if not uses_code:
        return []
    if any(map(failing.node, outside)):
        return [{"kind": "script", "text": text, "main": False}]
    if any(map(failing.node, main)):
        return [{"kind": "script", "text": text, "main": True}]
    lost = next((name for name, node in functions.items() if name not in called and failing.function(node)), None)
    if lost is not None:
        raise TestsError(f"{shown} defines {lost}() and never calls it; call it at the end of the test")
    return []


def _checked(text: str, check: ast.AST, failing: "_Failing", entry: str | None, shown: str) -> list[Unit]:
    if not failing.function(check):
        return []
    if entry is None:
        raise TestsError(
            f"{shown} defines check({check.args.args[0].arg}) and never calls it; give the row the function's name in a"  # type: ignore[attr-defined]
            " column entry_point, as HumanEval does, or call check at the end of the test"
        )
    return [{"kind": "check", "text": text, "entry": entry}]


class _Failing:
    """Finds out whether a part of a text can fail because of the code."""

    def __init__(self, functions: dict[str, _FUNCTION]) -> None:
        self._functions = functions
        self._known: dict[str, bool] = {}

    def node(self, node: ast.AST) -> bool:
        """Return whether a statement can fail: an assertion, an exception, or a call of a function that can."""
        return any(map(self._fails, _run(node)))

    def function(self, function: ast.AST) -> bool:
        """Return whether a function that is called can fail."""
        return any(self.node(statement) for statement in function.body)  # type: ignore[attr-defined]

    def _fails(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Assert):
            return not isinstance(node.test, ast.Constant) or not node.test.value
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, ast.Call):
            return False
        called = node.func
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        if name in self._functions and isinstance(called, ast.Name):
            if name not in self._known:
                self._known[name] = False  # A function that calls only itself can't fail.
                self._known[name] = self.function(self._functions[name])
            return self._known[name]
        return name.startswith("assert") or name in _FAILS


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a statement runs: not the bodies of what it defines."""
    if isinstance(node, _SCOPES):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _run(child)


def _names_of_the_code(tree: ast.Module) -> set[str]:
    """Return the names that a text uses and does not make."""
    used: set[str] = set()
    made: set[str] = set()
    code: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.ClassDef | _FUNCTION):
            made.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.module == CODE_MODULE:
            code |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            code |= {alias.name for alias in node.names} & {CODE_MODULE}
    free = used - made - {"__name__"}
    # If all are Python's own, such as in `assert sum(10, 15) == 6`, the code has a function of that name.
    return code | (free - set(dir(builtins)) or free)


def _test_classes(classes: dict[str, ast.ClassDef]) -> dict[str, list[_FUNCTION]]:
    """Return the test methods of each class, its bases' too, that unittest or pytest would run."""

    def is_case(node: ast.ClassDef) -> bool:
        names = [base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "") for base in node.bases]
        return any(name.endswith("TestCase") or (name in classes and is_case(classes[name])) for name in names)

    def methods(node: ast.ClassDef) -> dict[str, _FUNCTION]:
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        found = {name: method for base in bases for name, method in methods(classes[base]).items()}
        own = {each.name: each for each in node.body if isinstance(each, _FUNCTION) and each.name.startswith("test")}
        return {**found, **own}

    chosen = {
        name: node
        for name, node in classes.items()
        if (is_case(node) or name.startswith("Test")) and not _is_skipped(node)
    }
    return {name: list(methods(node).values()) for name, node in chosen.items() if methods(node)}


def _decorators(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield each decorator with the last part of its name."""
    for decorator in node.decorator_list:  # type: ignore[attr-defined]
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        yield target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", ""), decorator


def _is_skipped(node: ast.AST) -> bool:
    return any(name in _SKIPPED for name, _ in _decorators(node))


def _check_parameters(function: ast.AST, own: tuple[str, ...], shown: str) -> None:
    given: set[str] = set()
    for name, decorator in _decorators(function):
        if name == "parametrize" and isinstance(decorator, ast.Call) and decorator.args:
            named = decorator.args[0]
            items = named.elts if isinstance(named, ast.List | ast.Tuple) else [named]
            words = [str(item.value) for item in items if isinstance(item, ast.Constant)]
            given |= {word.strip() for text in words for word in text.split(",")}
    arguments = function.args  # type: ignore[attr-defined]
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [each.arg for each in positional[: len(positional) - len(arguments.defaults)]]
    fixtures = [name for name in required if name not in given and name not in own]
    if fixtures:
        raise TestsError(
            f"{shown} wants pytest's fixture {fixtures[0]!r}, which is not supported; make the value in the test"
        )


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(each, ast.Name) and each.id == "__name__" for each in ast.walk(node.test)
    )


def _check_runnable(tree: ast.Module, shown: str) -> None:
    """Refuse what no code could pass: modules that are not installed, and replacements that do not reach the code."""
    guarded = {id(each) for node in ast.walk(tree) if isinstance(node, ast.Try) for each in ast.walk(node)}
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{'.' * node.level}{node.module or ''}", *(f"{node.module}.{each.name}" for each in node.names)]
        if {"unittest.mock", "mock"} & set(modules) or _replaces(node):
            raise TestsError(
                f"{shown} replaces something of its own process (line {node.lineno}), which does not reach the code:"  # type: ignore[attr-defined]
                " that runs in another process; test what functions return, or give {input, output}"
            )
        top = modules[0].split(".")[0] if modules else CODE_MODULE
        if top != CODE_MODULE and id(node) not in guarded and not _is_installed(top):
            raise TestsError(
                f"{shown} imports {modules[0]!r}, which is not installed where rewards run; install it there, or, if it"
                f" stands for the response, import from {CODE_MODULE}"
            )


def _replaces(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "")) in ("redirect_stdout", "redirect_stderr")
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and ((target.value.id == "sys" and target.attr in _REPLACED) or target.value.id in ("builtins", "__builtins__"))
        for target in targets
    )


@cache
def _is_installed(module: str) -> bool:
    if module in sys.stdlib_module_names:
        return True
    try:
        return bool(module) and importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
