"""JSON schemas of the tools in the user's own Python, by transformers.

They are kept on the machine. To import transformers would take more than a second of each actor's start.
"""

import contextlib
import hashlib
import inspect
import json
import os
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhfless_functions.environments.user_code import Tool, UserCode
from rlhfless_functions.rewards.source import SourceError


def schemas(code: UserCode, kept: Path | None) -> list[dict[str, Any]]:
    """Return the schemas of the tools, from their type hints and docstrings; none for a game.

    Args:
        kept: folder for schemas that are kept; None to make them anew.

    Raises:
        SourceError: a tool lacks type hints or a docstring.
    """
    if code.is_game:
        return []
    tools = {name: _unbound(tool) for name, tool in code.tools().items()}
    digest = _digest(tools)
    file = kept / f"tool-schemas-{digest}.json" if kept is not None and digest is not None else None
    if file is not None and (read := _read(file, list(tools))) is not None:
        return read
    found = _made_in_a_fork(tools)
    if file is not None:
        with contextlib.suppress(OSError):
            written = file.with_name(f".{file.name}.{os.getpid()}")
            written.write_text(json.dumps(found))
            written.replace(file)
    return found


def _read(file: Path, names: list[str]) -> list[dict[str, Any]] | None:
    """Return the schemas that were kept of these tools; None if there are none, or others."""
    try:
        found = json.loads(file.read_text())
        return found if [each["function"]["name"] for each in found] == names else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _digest(tools: dict[str, Tool]) -> str | None:
    """Return a digest of all that the schemas are made from; None if it can't be made."""
    seen = [version("transformers")]
    try:
        for name, tool in tools.items():
            hints = typing.get_type_hints(tool, include_extras=True)
            seen.append(repr((name, tool.__name__, str(inspect.signature(tool)), tool.__doc__, hints)))
    except Exception:
        # What it says about a tool that can't be used is for `get_json_schema` to say.
        return None
    return hashlib.sha256("\0".join(seen).encode(errors="surrogatepass")).hexdigest()


def _made_in_a_fork(tools: dict[str, Tool]) -> list[dict[str, Any]]:
    """Return the tools' schemas. A fork makes them: what it imports would make each episode's fork larger.

    Raises:
        SourceError: a tool has none.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer: dict[str, Any] = {"schemas": _made(tools)}
        except BaseException as error:
            answer = {"error": str(error)}
        with os.fdopen(writing, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        written = pipe.read()
    os.waitpid(child, 0)
    answer = json.loads(written or '{"error": "the schemas of the tools could not be made"}')
    if "error" in answer:
        raise SourceError(answer["error"])
    return list(answer["schemas"])


def _made(tools: dict[str, Tool]) -> list[dict[str, Any]]:
    from transformers.utils import get_json_schema  # takes most of a second

    found = []
    for name, tool in tools.items():
        try:
            found.append(get_json_schema(tool))
        except Exception as error:  # DocstringParsingException, TypeHintParsingException and others
            raise SourceError(
                f"tool {name!r} has no schema: {error}; give each argument a type hint and a line in the docstring's"
                " Args section"
            ) from error
    return found


def _unbound(tool: Tool) -> Tool:
    """Return a tool whose signature has no `self`: a class's function is not bound to an object yet."""
    parameters = list(inspect.signature(tool).parameters.values())
    if not (parameters and parameters[0].name == "self" and inspect.isfunction(tool)):
        return tool

    def bound(*args: Any, **kwargs: Any) -> None: ...

    bound.__name__, bound.__doc__ = tool.__name__, tool.__doc__
    bound.__annotations__ = dict(getattr(tool, "__annotations__", {}))
    bound.__signature__ = inspect.Signature(parameters[1:])  # type: ignore[attr-defined]
    return bound
