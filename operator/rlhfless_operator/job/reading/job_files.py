"""The check that the local files of a job exist and are of the right kind."""

import ast
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhfless_functions.data.sources import SourceError, is_pattern, local_files
from rlhfless_functions.rewards.signatures import DEFAULT, usual_function
from rlhfless_functions.settings import (
    DataSettings,
    EnvironmentSettings,
    MixedSource,
    PythonReward,
    RewardSettings,
    RowFunction,
)
from rlhfless_operator.job.paths import exists, is_template_text, is_uri, local_file, local_model
from rlhfless_operator.job.reading.fields import Path as FieldPath
from rlhfless_operator.job.spec import RLHFJob

_HUB_DATASET = re.compile(r"[\w.-]+/(?![\w.-]+\.(jsonl?|ndjson|parquet|pq|csv|tsv|txt|arrow|zip)(\.\w+)?$)[\w.-]+")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class FileFault:
    """Something wrong with a file that a field names."""

    path: FieldPath
    """The field."""
    message: str
    remedy: str


def check_files(job: RLHFJob, base: Path) -> list[FileFault]:
    """Find the faults of a job's local files. URIs and names on the hub are not checked.

    Args:
        job: the job as read, with paths relative to the job file.
        base: the job file's folder.
    """
    spec = job.spec
    faults = [*_model(("spec", "model", "source"), spec.model.source, base)]
    if spec.model.tokenizer is not None:
        faults += _folder(("spec", "model", "tokenizer"), spec.model.tokenizer, base)
    if spec.model.chat_template is not None:
        faults += _chat_template(("spec", "model", "chatTemplate"), spec.model.chat_template, base)
    faults += _data(("spec", "data"), spec.data, base)
    if spec.evaluation is not None:
        faults += _data(("spec", "evaluation", "data"), spec.evaluation.data, base)
        faults += _rewards(("spec", "evaluation", "rewards"), spec.evaluation.rewards or [], base)
    if spec.environment is not None:
        faults += _environment(("spec", "environment"), spec.environment, base)
    return [*faults, *_rewards(("spec", "rewards"), spec.rewards, base)]


def _environment(field: FieldPath, environment: EnvironmentSettings, base: Path) -> Iterator[FileFault]:
    if environment.python is not None:
        python = environment.python
        yield from _member(
            (*field, "python", "file"), (*field, "python", "class"), python.file, python.class_name, base
        )
    for number, tool in enumerate(environment.tools):
        file, _, function = tool.rpartition(":")
        named = (*field, "tools", number)
        yield from _member(named, named, file, function, base)


def _rewards(field: FieldPath, rewards: Sequence[RewardSettings], base: Path) -> Iterator[FileFault]:
    for position, reward in enumerate(rewards):
        place = (*field, position)
        if reward.python is not None:
            yield from _python((*place, "python"), reward.python, base)
        if reward.model is not None:
            yield from _model((*place, "model", "source"), reward.model.source, base)


def _folder(field: FieldPath, name: str, base: Path) -> Iterator[FileFault]:
    path = local_model(name, base)
    if path is None:
        if not is_uri(name) and not _HUB_NAME.fullmatch(name):
            yield FileFault(field, f"{name} is neither a folder nor a hub name", "begin a path with ./ and check it")
    elif not exists(path):
        yield FileFault(field, f"the folder {path} does not exist", "check the path; it is relative to the job file")
    elif not path.is_dir():
        yield FileFault(field, f"{path} is a file", "name the Hugging Face folder that it is in")


def _model(field: FieldPath, name: str, base: Path) -> Iterator[FileFault]:
    yield from _folder(field, name, base)
    path = local_model(name, base)
    if path is not None and path.is_dir() and not (path / "config.json").is_file():
        yield FileFault(field, f"{path} has no config.json", "name a folder made by save_pretrained")


def _chat_template(field: FieldPath, text: str, base: Path) -> Iterator[FileFault]:
    path = None if is_template_text(text) else local_file(text, base)
    if path is not None and not _is_file(path):
        yield FileFault(
            field,
            f"{text[:60]!r} is neither a file nor a template, which would contain {{{{ or {{%",
            "check the path; it is relative to the job file",
        )


def sources_of(field: FieldPath, data: DataSettings) -> list[tuple[FieldPath, MixedSource]]:
    """Return the sources of a dataset, each with the path of the section that names it."""
    if data.sources is None:
        return [(field, part) for part in data.parts]
    return [((*field, "sources", number), part) for number, part in enumerate(data.parts)]


def _data(section: FieldPath, data: DataSettings, base: Path) -> Iterator[FileFault]:
    for place, part in sources_of(section, data):
        yield from _source((*place, "source"), part, base)
        for name, function in (("map", part.map), ("filter", part.filter)):
            if function is not None:
                yield from _python((*place, name), function, base)


def _source(field: FieldPath, part: MixedSource, base: Path) -> Iterator[FileFault]:
    path = local_file(part.source, base)
    if path is None:
        return
    if not exists(path) and is_pattern(part.source):
        try:
            local_files(path, part.split)
        except SourceError as error:
            yield FileFault(field, error.message, error.remedy)
    elif not exists(path):
        if hub := hub_remedy(part.source):
            yield FileFault(field, f"{part.source} is neither a file nor a folder beside the job file ({path})", hub)
        else:
            yield FileFault(field, f"{path} does not exist", "check the path; it is relative to the job file")
    elif path.is_dir() and not any(path.iterdir()):
        yield FileFault(field, f"the folder {path} is empty", "name a dataset with at least one prompt")
    elif path.is_file() and path.stat().st_size == 0:
        yield FileFault(field, f"{path} is empty", "name a dataset with at least one prompt")


def hub_remedy(source: str) -> str | None:
    """Return the remedy for a source that looks like a dataset on the Hugging Face hub; None for any other."""
    if not _HUB_DATASET.fullmatch(source) or source.startswith("."):
        return None
    local = source.rpartition("/")[2]
    return (
        f"if you mean a dataset on the Hugging Face hub, write hub:{source}, or download it (hf download {source}"
        f" --repo-type dataset --local-dir {local}) and name {local}"
    )


def _python(field: FieldPath, reward: PythonReward | RowFunction, base: Path) -> Iterator[FileFault]:
    yield from _member((*field, "file"), (*field, "function"), reward.file, reward.function, base)


def _member(field: FieldPath, name_field: FieldPath, file: str, name: str | None, base: Path) -> Iterator[FileFault]:
    """Find the faults of a Python file, and of the class or function that it must have; by default, of its reward."""
    path = local_file(file, base)
    if path is None:
        return
    if not _is_file(path):
        message = f"{path} is not a file" if exists(path) else f"{path} does not exist"
        yield FileFault(field, message, "check the path; it is relative to the job file")
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f"line {line} of {path}" if line else str(path)
        yield FileFault(field, f"{place} is not valid Python: {error}", "correct it")
        return
    names = set(_top_level_names(tree.body))
    wanted = name or (DEFAULT if DEFAULT in names else usual_function(tree.body))
    if wanted not in names and "*" not in names:
        kind = "class" if name_field[-1] == "class" else "function"
        kinds = (ast.ClassDef,) if kind == "class" else (ast.FunctionDef, ast.AsyncFunctionDef)
        close = difflib.get_close_matches(wanted, sorted(names), n=1)
        have = sorted(node.name for node in tree.body if isinstance(node, kinds) and node.name[0] != "_")
        several = "classes" if kind == "class" else "functions"
        remedy = f"it has {', '.join(have) or f'no {several}'}"
        if name is None and have:
            remedy += ": set python.function to one of them"
        elif close:
            remedy = f"did you mean {close[0]}?"
        yield FileFault(name_field, f"{path} has no {kind} {wanted}", remedy)


def _top_level_names(body: list[ast.stmt]) -> Iterator[str]:
    """Yield the names that a module defines; `*` if its text does not tell."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
        else:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
                elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield inner.name
                elif isinstance(inner, ast.alias):
                    yield (inner.asname or inner.name).split(".")[0]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False
