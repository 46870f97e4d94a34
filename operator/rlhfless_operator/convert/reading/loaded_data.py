"""Datasets that a Python script loads: calls of `load_dataset`, and the methods that follow them."""

import ast
from collections.abc import Callable
from typing import Any

Entry = dict[str, Any]
"""Arguments of `load_dataset`, and `changes`, as `convert.datasets` reads them."""

_LOADERS = ("load_dataset", "from_json", "from_parquet", "from_csv")
_SAME_ROWS = ("shuffle", "with_format", "remove_columns", "select_columns", "flatten_indices", "cast_column")
"""Methods that change neither the rows that there are nor the columns that a job reads."""
_ARGUMENTS = ("path", "name", "split", "revision", "data_files", "data_dir")


def loaded(node: ast.expr, origin: Callable[[ast.expr], ast.expr], value: Callable[[ast.expr], Any]) -> list[Entry]:
    """Return the entries that an expression loads, several if it concatenates them.

    Args:
        node: the expression.
        origin: returns the expression that a name was assigned.
        value: returns the value of an expression.

    Raises:
        ValueError: it is made in another way.
    """
    node = origin(node)
    match node:
        case ast.Subscript(value=inner, slice=ast.Constant(value=str(split))):
            return [{**entry, "split": split} for entry in loaded(inner, origin, value)]
        case ast.Call(func=ast.Name() | ast.Attribute()) if _name(node) in _LOADERS:
            return [_entry(node, value)]
        case ast.Call(args=[parts, *_]) if _name(node) == "concatenate_datasets":
            listed = origin(parts)
            if isinstance(listed, ast.List | ast.Tuple):
                return [entry for part in listed.elts for entry in loaded(part, origin, value)]
        case ast.Call(func=ast.Attribute(value=inner, attr=method)):
            entries = loaded(inner, origin, value)
            if method in _SAME_ROWS:
                return entries
            change = (method, " ".join(ast.unparse(node.args[0]).split()) if node.args else "")
            return [{**entry, "changes": [*entry.get("changes", []), change]} for entry in entries]
    raise ValueError("the script makes it: write its rows to a file")


def _name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def _entry(call: ast.Call, value: Callable[[ast.expr], Any]) -> Entry:
    """Return the entry of a call that loads a dataset."""
    given = dict(zip(("path", "name"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg in _ARGUMENTS}
    entry = {name: value(node) for name, node in given.items()}
    kind = _name(call).removeprefix("from_")
    if kind != "load_dataset":
        entry = {"path": kind, "data_files": entry.pop("path", None), **entry}
    return entry
