"""Messages of OpenEnv's protocol: what servers answer, and the actions that are read from a model's text."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhfless_functions.environments.results import cut
from rlhfless_functions.environments.sessions import EpisodeFailedError

_EXCERPT = 200
_THOUGHTS = re.compile(r".*</think>", re.DOTALL)
_FAULTS = {"tool_not_found": "unknown_tool", "invalid_args": "wrong_arguments"}
"""Our names of OpenEnv's errors of tools. All others are `raised`."""
_TYPES: dict[str, tuple[type, ...]] = {"integer": (int,), "number": (int, float), "boolean": (bool,)}


class ServerError(Exception):
    """An error that the server answered.

    Args:
        code: the protocol's code.
        message: the server's message.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Answer:
    """An observation of an environment."""

    observation: Any
    reward: float
    done: bool

    def text(self, longest: int) -> str:
        """Return the observation for the model: its only text, or JSON of all that it has."""
        return cut(_shown(self.observation), longest)

    def of_call(self, longest: int) -> dict[str, Any]:
        """Return the answer to a call of a tool: `result`, or its `fault` with a `message`."""
        seen = self.observation if isinstance(self.observation, Mapping) else {"result": self.observation}
        error = seen.get("error")
        if error:
            kind = error.get("error_type") if isinstance(error, Mapping) else None
            said = error.get("message", error) if isinstance(error, Mapping) else error
            return {"fault": _FAULTS.get(str(kind), "raised"), "message": cut(str(said), longest), "done": self.done}
        result = seen.get("result") if "result" in seen else seen
        said = cut(_result(result), longest)
        if isinstance(result, Mapping) and result.get("is_error"):
            return {"fault": "raised", "message": said, "done": self.done}
        return {"result": said, "done": self.done}


def read_answer(text: str, asked: str) -> Answer:
    """Read a message of the server.

    Args:
        asked: type of the request.

    Raises:
        ServerError: it is an error.
        EpisodeFailedError: it is not a message of the protocol, or answers another type of request.
    """
    try:
        message = json.loads(text)
        kind, data = message["type"], message.get("data") or {}
        if kind == "error":
            raise ServerError(str(data.get("code", "")), _message(data))
        if kind == "observation" and asked != "state":
            reward = data.get("reward")
            return Answer(data["observation"], 0.0 if reward is None else float(reward), bool(data.get("done")))
        if kind == "state" and asked == "state":
            return Answer(None, 0.0, False)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        pass
    raise EpisodeFailedError(
        f"answered what OpenEnv's protocol does not have ({short(text)}); rlhfless speaks that of openenv 0.2 to 0.10"
    )


def tool_schemas(answer: Answer) -> list[dict[str, Any]]:
    """Return the schemas of an environment's tools as chat templates want them; none if it lists none.

    Raises:
        EpisodeFailedError: they are no schemas.
    """
    tools = answer.observation.get("tools") if isinstance(answer.observation, Mapping) else None
    try:
        return [
            {
                "type": "function",
                "function": {
                    "name": str(tool["name"]),
                    "description": str(tool.get("description") or tool["name"]),
                    "parameters": dict(tool.get("input_schema") or {"type": "object", "properties": {}}),
                },
            }
            for tool in tools or []
        ]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise EpisodeFailedError(f"lists tools in another form than OpenEnv's ({short(json.dumps(tools))})") from None


class Actions:
    """The actions of an environment without tools.

    Args:
        schema: JSON schema of an action; empty if it is unknown.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        fields = {name: each for name, each in (schema.get("properties") or {}).items() if name != "metadata"}
        required = [name for name in schema.get("required") or [] if name in fields]
        names = required if len(required) == 1 else list(fields)
        self._field = names[0] if len(names) == 1 else None
        self._fields = list(fields)
        self._type = str(fields[names[0]].get("type")) if self._field is not None else ""

    def read(self, text: str) -> dict[str, Any] | str:
        """Return the action in a model's text: a JSON object, or the value of the only field. Return the fault, for the
        model, if there is none."""
        text = _THOUGHTS.sub("", text, count=1).strip()
        try:
            value: Any = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        if self._field is None:
            named = f" with {', '.join(self._fields)}" if self._fields else ""
            return f"the action is not a JSON object{named}"
        wanted = _TYPES.get(self._type)
        if wanted is None:
            return {self._field: text if self._type != "array" or value is None else value}
        if isinstance(value, wanted) and (wanted == (bool,) or not isinstance(value, bool)):
            return {self._field: value}
        return f"the action {short(text)!r} is not of type {self._type}"


def _shown(value: Any) -> str:
    """Return a value for the model. Fields without a value say nothing, and `metadata` is not for the model: servers
    of older releases keep it for themselves."""
    if isinstance(value, Mapping):
        value = {name: each for name, each in value.items() if each not in (None, {}, "") and name != "metadata"}
        if not value:
            return ""
        if len(value) == 1 and isinstance(text := next(iter(value.values())), str):
            return text
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result(result: Any) -> str:
    """Return the result of a tool. Some servers wrap it as MCP does."""
    if isinstance(result, Mapping):
        if result.get("data") is not None:
            result = result["data"]
        elif isinstance(content := result.get("content"), list):
            return "\n".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)


def _message(data: Mapping[str, Any]) -> str:
    """Return the message of an error, with the faults of an action that is not valid."""
    errors = data.get("errors")
    if not isinstance(errors, list):
        return str(data.get("message", ""))
    faults = [
        f"{'.'.join(map(str, each.get('loc') or []))}: {each.get('msg')}" for each in errors if isinstance(each, dict)
    ]
    return f"the action is not valid ({'; '.join(faults)})"


def short(text: str) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}…"
