"""Read a Python script that trains with TRL: its syntax alone, nothing of it runs."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhfless_operator.convert.conversion import Unknown
from rlhfless_operator.convert.datasets import BUILDERS
from rlhfless_operator.convert.reading.fields import Configuration, UnreadableConfigurationError
from rlhfless_operator.convert.reading.loaded_data import loaded
from rlhfless_operator.convert.reading.overrides import whole

_LORA = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
    "target_parameters": "lora_target_parameters",
    **{name: name for name in ("lora_alpha", "lora_dropout", "use_rslora", "use_dora")},
}
_TRAINER = {"processing_class", "callbacks", "optimizers", "rollout_func", "reward_processing_classes",
            "quantization_config"}  # fmt: skip


def read_python(path: Path, text: str) -> Configuration:
    """Read `GRPOConfig(...)`, `GRPOTrainer(...)` and `LoraConfig(...)` of a script.

    Raises:
        UnreadableConfigurationError: it is no Python, or has not one `GRPOConfig(...)`.
    """
    try:
        script = _Script(ast.parse(text))
    except (SyntaxError, ValueError) as error:
        raise UnreadableConfigurationError(f"{path} is no Python ({error})") from error
    configs = script.calls("GRPOConfig")
    if not configs:
        raise UnreadableConfigurationError(
            f"{path} has no GRPOConfig(...) to read; convert the YAML that it takes, or the command that starts it"
        )
    if len(configs) > 1:
        lines = ", ".join(str(call.lineno) for call in configs)
        raise UnreadableConfigurationError(
            f"{path} has {len(configs)} GRPOConfig(...) (lines {lines}); put the one to convert into a file of its own"
        )
    found = Configuration("trl", {})
    for keyword in configs[0].keywords:
        if keyword.arg is None:
            found.lost[f"**{ast.unparse(keyword.value)}"] = "its fields are known only when the script runs"
        else:
            found.fields[keyword.arg] = whole(script.value(keyword.value))
    for number, argument in enumerate(configs[0].args):
        found.fields["output_dir" if not number else f"argument {number}"] = whole(script.value(argument))
    for call in script.calls("GRPOTrainer")[:1]:
        _read_trainer(call, script, found, path)
    return found


def _read_trainer(call: ast.Call, script: "_Script", found: Configuration, path: Path) -> None:
    given = {keyword.arg or "**": keyword.value for keyword in call.keywords}
    given |= dict(zip(("model", "reward_funcs", "args", "train_dataset", "eval_dataset"), call.args, strict=False))
    for name, value in given.items():
        if name == "model":
            found.fields["model_name_or_path"] = _model(script.origin(value), script)
        elif name == "reward_funcs":
            found.fields["reward_funcs"] = _rewards(value, script, path)
        elif name == "tools":
            found.fields["tools"] = _members(script.origin(value), script, path)
        elif name == "environment_factory":
            found.fields["environment_factory"] = _member(value, script, path)
        elif name == "train_dataset":
            found.fields |= _dataset(value, script)
        elif name == "eval_dataset":
            if not (isinstance(value, ast.Constant) and value.value is None):
                found.fields["eval_dataset"] = _entries(value, script)
        elif name == "peft_config":
            _read_lora(script.origin(value), script, found)
        elif name in _TRAINER or name == "**":
            shown = " ".join(ast.unparse(value).split())
            found.lost[f"{name}={shown}"] = "it is code, which a job has no field for"


def _model(node: ast.expr, script: "_Script") -> Any:
    """Return the name of a model that is given by name, or loaded by `from_pretrained`."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("from_pretrained") and node.args:
        node = node.args[0]
    return whole(script.value(node))


def _read_lora(node: ast.expr, script: "_Script", found: Configuration) -> None:
    if isinstance(node, ast.Constant) and node.value is None:
        return
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("LoraConfig")):
        found.lost[f"peft_config={ast.unparse(node)}"] = "it is no LoraConfig(...) that can be read: write model.lora"
        return
    found.fields["use_peft"] = True
    # The defaults of peft's LoraConfig are not those of TRL's command.
    found.fields |= {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
    for keyword in node.keywords:
        if keyword.arg in _LORA:
            found.fields[_LORA[keyword.arg]] = whole(script.value(keyword.value))
        elif keyword.arg not in ("bias", "inference_mode"):
            found.lost[f"LoraConfig({ast.unparse(keyword)})"] = "adapters are plain LoRA"


def _rewards(node: ast.expr, script: "_Script", path: Path) -> Any:
    """Return the names of reward functions: `module.function`, or TRL's own by its name."""
    origin = script.origin(node)
    items = list(origin.elts) if isinstance(origin, ast.List | ast.Tuple) else [origin]
    names: list[Any] = []
    for item in items:
        name = item.id if isinstance(item, ast.Name) else ast.unparse(item)
        if isinstance(item, ast.Constant) and isinstance(item.value, str):
            names.append(Unknown(item.value, "it is a reward model: write rewards: [{model: {source: …}}]"))
        elif not isinstance(item, ast.Name | ast.Attribute):
            names.append(Unknown(name, "it is made when the script runs: write a function of its own"))
        elif name in script.functions:
            names.append(f"{path.stem}.{name}")
        else:
            module = script.imported.get(name, "")
            is_trl = module.split(".")[0] in ("trl", "")
            names.append(name if is_trl else f"{module}.{name.rpartition('.')[2]}")
    return whole(names)


def _members(node: ast.expr, script: "_Script", path: Path) -> Any:
    """Return the names of functions in a list."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if not isinstance(node, ast.List | ast.Tuple):
        return Unknown(ast.unparse(node), "it is made when the script runs: write environment.tools")
    return whole([_member(item, script, path) for item in node.elts])


def _member(node: ast.expr, script: "_Script", path: Path) -> Any:
    """Return the name of a function or a class: `module.name`, or the name alone if its module is not known."""
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if not isinstance(node, ast.Name | ast.Attribute):
        return Unknown(" ".join(ast.unparse(node).split()), "it is made when the script runs: name a class or function")
    name = ast.unparse(node)
    if name in script.functions | script.classes:
        return f"{path.stem}.{name}"
    module = script.imported.get(name, "")
    return f"{module}.{name}" if module else name


def _dataset(node: ast.expr, script: "_Script") -> dict[str, Any]:
    """Return the fields of the data that a script trains on, by TRL's names where they suffice."""
    entries = _entries(node, script)
    if isinstance(entries, Unknown):
        return {"dataset_name": entries}
    names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
    if len(entries) == 1 and entries[0].keys() <= names.keys() and entries[0]["path"] not in BUILDERS:
        return {names[name]: value for name, value in entries[0].items()}
    return {"datasets": entries}


def _entries(node: ast.expr, script: "_Script") -> Any:
    try:
        return whole(loaded(node, script.origin, script.value))
    except ValueError as error:
        return Unknown(" ".join(ast.unparse(node).split()), str(error))


class _Script:
    """A script's functions, imports and the values that names have."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        self._values: dict[str, list[ast.expr | None]] = {}
        self.functions = {
            node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        self.classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self.imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                self.imported |= {alias.asname or alias.name: node.module or "" for alias in node.names}
            for name, value in _assigned(node):
                self._values.setdefault(name, []).append(value)

    def calls(self, name: str) -> list[ast.Call]:
        """Return the calls of a class, by the last part of its name."""
        calls = (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))
        return [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == name]

    def origin(self, node: ast.expr) -> ast.expr:
        """Return what a name was assigned, if it was assigned once."""
        for _ in range(20):
            values = self._values.get(node.id, []) if isinstance(node, ast.Name) else []
            if len(values) != 1 or values[0] is None:
                return node
            node = values[0]
        return node

    def value(self, node: ast.expr, depth: int = 0) -> Any:
        """Return the value of an expression: of literals, names that were assigned once, and arithmetic of these."""
        shown = " ".join(ast.unparse(node).split())
        if depth > 20:
            return Unknown(shown, "it refers to itself")
        try:
            return self._computed(node, depth)
        except (ArithmeticError, KeyError, TypeError, ValueError):
            return Unknown(shown, f"{shown} is known only when the script runs")

    def _computed(self, node: ast.expr, depth: int) -> Any:
        def inner(part: ast.expr) -> Any:
            found = self.value(part, depth + 1)
            if isinstance(found, Unknown):
                raise ValueError(found.reason)
            return found

        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                origin = self.origin(node)
                if origin is node:
                    raise ValueError(node.id)
                return self.value(origin, depth + 1)
            case ast.List() | ast.Tuple() | ast.Set():
                return [self.value(item, depth + 1) for item in node.elts]
            case ast.Dict():
                return {inner(key): self.value(item, depth + 1)
                        for key, item in zip(node.keys, node.values, strict=True) if key is not None}  # fmt: skip
            case ast.UnaryOp(op=ast.USub()):
                return -inner(node.operand)
            case ast.BinOp():
                return _operated(node.op, inner(node.left), inner(node.right))
            case ast.JoinedStr():
                return "".join(str(inner(p.value if isinstance(p, ast.FormattedValue) else p)) for p in node.values)
            case ast.Attribute() if ast.unparse(node).startswith("torch."):
                return node.attr
        raise ValueError(ast.unparse(node))


def _operated(operator: ast.operator, left: Any, right: Any) -> Any:
    match operator:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult() if not isinstance(left, str | list) or right < 1000:
            return left * right
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return left // right
        case ast.Pow() if abs(right) < 100:
            return left**right
    raise ValueError("an operator that is not computed")


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    """Return the names that a statement assigns; None where the value is not an expression of its own."""
    match node:
        case ast.Assign():
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node.value
                else:
                    yield from ((name.id, None) for name in ast.walk(target) if isinstance(name, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.AugAssign(target=ast.Name(id=name)) | ast.For(target=ast.Name(id=name)):
            yield name, None
        case ast.NamedExpr(target=ast.Name(id=name)):
            yield name, None
        case ast.arg():
            yield node.arg, None
        case ast.Global():
            yield from ((name, None) for name in node.names)
