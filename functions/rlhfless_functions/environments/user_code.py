"""The user's class and functions, as an episode needs them: begin, call a tool, take a step, score. Runs in workers."""

import inspect
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhfless_functions.rewards.calls import describe, event_loop
from rlhfless_functions.rewards.source import SourceError, run_file

Tool = Callable[..., Any]
_OWN = frozenset({"reset", "get_reward", "close"})
"""Public methods of a class that are no tools."""


class EnvironmentFaultError(Exception):
    """The environment raised, or answered what can't be used; the message ends a sentence that begins with it."""


@dataclass(frozen=True)
class UserCode:
    """The class and the functions of a job."""

    made: Callable[[], Any] | None
    """The class."""
    functions: Mapping[str, Tool] = field(default_factory=dict)

    @property
    def is_game(self) -> bool:
        """Whether the class takes the model's text, and has no tools."""
        return callable(getattr(self.made, "step", None))

    def tools(self, instance: Any = None) -> dict[str, Tool]:
        """Return the tools by name: of an object of the class, or of the class itself if there is none."""
        owner = self.made if instance is None else instance
        return {**{name: getattr(owner, name) for name in _methods(self.made)}, **self.functions}


def load(python: Mapping[str, Any] | None, tools: list[Mapping[str, Any]], scratch: Path) -> UserCode:
    """Run the user's files.

    Args:
        python: `file`, `text` and `class` of the environment.
        tools: `file`, `text` and `function` of each tool.
        scratch: folder for files.

    Raises:
        SourceError: a file, class or function can't be used. Errors of the files themselves are not caught.
    """
    made = None
    if python is not None:
        made = _member(python, python["class"], "class", scratch)
        if not inspect.isclass(made):
            raise SourceError(f"{python['class']!r} in {python['file']} is not a class; name one in python.class")
    functions: dict[str, Tool] = {}
    for tool in tools:
        found = _member(tool, tool["function"], "function", scratch)
        if not callable(found):
            raise SourceError(f"{tool['function']!r} in {tool['file']} is not a function")
        if tool["function"] in functions or tool["function"] in _methods(made):
            raise SourceError(f"has two tools named {tool['function']!r}; rename one of them")
        functions[tool["function"]] = found
    code = UserCode(made, functions)
    if code.is_game and functions:
        raise SourceError("has step(text), so the model calls no tools; remove environment.tools, or rename step")
    if not code.is_game and not code.tools():
        raise SourceError(
            f"class {python['class'] if python else ''} has no tools and no step(text); write a public method for each"
            " tool, with type hints and a docstring"
        )
    return code


class Episode:
    """One episode of the user's code.

    Args:
        code: the class and the functions.
        seed: seed of everything random.
    """

    def __init__(self, code: UserCode, seed: int) -> None:
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        self._code = code
        self._seed = seed
        self._instance: Any = None
        self._tools: dict[str, Tool] = {}
        self._sum = 0.0

    def begin(self, row: Mapping[str, Any]) -> str | None:
        """Make the object and reset it. Return its text for the model.

        Raises:
            EnvironmentFaultError: it raised, or returned something else.
        """
        if self._code.made is not None:
            self._instance = _called("", self._code.made)
        self._tools = {} if self._code.is_game else self._code.tools(self._instance)
        reset = getattr(self._instance, "reset", None)
        if reset is None:
            return None
        text = _called("reset", reset, **_wanted(reset, {"seed": self._seed, **row}, row))
        # Gymnasium's reset returns (observation, info).
        if isinstance(text, tuple) and len(text) == 2 and isinstance(text[1], dict):
            text = text[0]
        if text is not None and not isinstance(text, str):
            raise EnvironmentFaultError(f"returned {type(text).__name__} from reset, not text or None")
        return text

    def call(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call a tool. Return its `result`, or the `fault` with a `message` for the model."""
        tool = self._tools.get(name)
        if tool is None:
            have = ", ".join(sorted(self._tools))
            return {"fault": "unknown_tool", "message": f"there is no tool {name[:80]!r}; the tools are {have}"}
        try:
            bound = inspect.signature(tool).bind(**arguments)
        except (TypeError, ValueError) as error:
            return {"fault": "wrong_arguments", "message": f"wrong arguments for {name}: {error}"}
        try:
            return {"result": str(_settled(tool(*bound.args, **bound.kwargs)))}
        except Exception as error:
            return {"fault": "raised", "message": f"{type(error).__name__}: {error}"}

    def step(self, text: str) -> dict[str, Any]:
        """Give a game the model's text. Return its `text` (None if it is over) and whether it is `done`.

        Raises:
            EnvironmentFaultError: it raised, or returned something else.
        """
        answer, reward, done = _step_answer(_called("step", self._instance.step, text))
        self._sum += reward
        return {"text": answer, "done": done or answer is None}

    def score(self) -> float | None:
        """Return the environment's reward: `get_reward()`, or the sum of a game's rewards; None if it has none.

        Raises:
            EnvironmentFaultError: it raised, or returned no number.
        """
        own = getattr(self._instance, "get_reward", None)
        if own is None:
            return self._sum if self._code.is_game else None
        value = _called("get_reward", own)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise EnvironmentFaultError(f"returned {value!r:.80} from get_reward, not a number") from None
        if number != number or number in (float("inf"), float("-inf")):
            raise EnvironmentFaultError(f"returned {number} from get_reward, not a finite number")
        return number


def _methods(made: Any) -> list[str]:
    if made is None:
        return []
    return [
        name
        for name, value in inspect.getmembers(made, inspect.isroutine)
        if not name.startswith("_") and name not in _OWN and not isinstance(value, type)
    ]


def _member(named: Mapping[str, Any], name: str, kind: str, scratch: Path) -> Any:
    module = run_file(named["file"], scratch, named["text"], f"rlhfless_environment_{named['number']}")
    found = getattr(module, name, None)
    if found is None:
        wanted = inspect.isclass if kind == "class" else inspect.isfunction
        have = sorted(each for each, value in vars(module).items() if wanted(value) and not each.startswith("_"))
        raise SourceError(f"{named['file']} has no {kind} {name!r}; it has {', '.join(have) or 'none'}")
    return found


def _called(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return _settled(function(*args, **kwargs))
    except Exception as error:
        raise EnvironmentFaultError(f"{f'{name}: ' if name else ''}{describe(error)}") from error


def _settled(result: Any) -> Any:
    return event_loop().run_until_complete(result) if inspect.isawaitable(result) else result


def _wanted(function: Callable[..., Any], available: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function names of the columns, or all of them if it takes any."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return {**row, **{name: available[name] for name in parameters if name in available}}
    return {name: available[name] for name in parameters if name in available}


def _step_answer(answer: Any) -> tuple[str | None, float, bool]:
    """Return the text, the reward and whether the game is over, from any of the usual forms."""
    reward: Any = 0.0
    done = False
    if isinstance(answer, tuple) and len(answer) in (2, 3, 4, 5):
        if len(answer) == 2:
            answer, done = answer
        elif len(answer) == 5:
            answer, reward, done = answer[0], answer[1], bool(answer[2] or answer[3])
        else:
            answer, reward, done = answer[:3]
    elif isinstance(answer, Mapping):
        given = answer.get("observations", answer.get("observation"))
        answer, reward, done = _joined(given), answer.get("reward", 0.0), answer.get("done", False)
    if answer is not None and not isinstance(answer, str):
        raise EnvironmentFaultError(
            f"returned {type(answer).__name__} from step; return text, (text, reward, done), or None at the end"
        )
    try:
        return answer, float(reward or 0.0), bool(done)
    except (TypeError, ValueError):
        raise EnvironmentFaultError(f"returned {reward!r:.80} as a step's reward, not a number") from None


def _joined(given: Any) -> Any:
    """Return messages (SkyRL's form) as one text."""
    if isinstance(given, list):
        return "\n".join(str(each["content"]) if isinstance(each, Mapping) else str(each) for each in given)
    return given
