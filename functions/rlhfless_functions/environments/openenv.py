"""Environments that a server of OpenEnv plays: a client of its WebSocket. One connection is one episode."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

import aiohttp

from rlhfless_functions.environments.connections import CONNECT_SECONDS, Line, Server
from rlhfless_functions.environments.openenv_messages import Actions, Answer, ServerError, read_answer, tool_schemas
from rlhfless_functions.environments.sessions import EnvironmentUnusableError, EpisodeFailedError, SessionLostError
from rlhfless_functions.runtime.activity import limited_wait
from rlhfless_functions.settings import EnvironmentSettings

_REMEDY = "environment.openenv.url is the address of a server of OpenEnv 0.2 or later, without /ws"
_ACTION_FAULTS = {"VALIDATION_ERROR": "wrong_arguments", "EXECUTION_ERROR": "raised"}
"""Kinds of a server's errors that an action of the model caused."""


class OpenEnvHost:
    """A server of OpenEnv. The constructor connects once, to learn what tools it has.

    Args:
        settings: the job's environment, with `openenv`.

    Raises:
        EnvironmentUnusableError: nothing answers there, or something else does.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        openenv = settings.openenv
        assert openenv is not None and openenv.url is not None
        self._settings = settings
        self.server = Server(settings, openenv.url, openenv.start_limit, _REMEDY)
        try:
            with limited_wait(openenv.start_limit + 2 * CONNECT_SECONDS + settings.tool_seconds):
                self.schemas, self.actions = self.server.do(self._learnt()).result()
        except (EpisodeFailedError, SessionLostError) as error:
            self.close()
            raise EnvironmentUnusableError(str(error)) from error
        except BaseException:
            self.close()
            raise
        self.is_game = not self.schemas

    def alive(self) -> bool:
        """Return whether it can begin episodes."""
        return self.server.alive()

    def begin(self) -> "OpenEnvSession":
        """Return a new session, which connects with its first request."""
        return OpenEnvSession(self.server, self._settings, self.actions)

    def close(self) -> None:
        """Close all connections."""
        self.server.close()

    async def _learnt(self) -> tuple[list[dict[str, Any]], Actions]:
        """Return the schemas of the tools, and what actions are made of."""
        connection = await self.server.connected(self.server.start_limit)
        try:
            answer = await connection.exchange("step", {"type": "list_tools"}, self._settings.tool_seconds)
            return tool_schemas(read_answer(answer, "step")), Actions({})
        except ServerError:
            return [], Actions(await self._action_schema())
        finally:
            await connection.close()

    async def _action_schema(self) -> Mapping[str, Any]:
        http = await self.server.http()
        try:
            async with asyncio.timeout(CONNECT_SECONDS), http.get(self.server.schema_url) as response:
                schema = (await response.json())["action"] if response.status == 200 else {}
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError, OSError):
            schema = {}
        return schema if isinstance(schema, dict) else {}


class OpenEnvSession:
    """An episode on a server; see `Session`.

    Args:
        server: connects.
        settings: the job's environment.
        actions: what actions are made of, if the environment has no tools.
    """

    def __init__(self, server: Server, settings: EnvironmentSettings, actions: Actions) -> None:
        self._settings = settings
        self._actions = actions
        self._line = Line(server)
        self._rewards = 0.0

    @property
    def waited(self) -> float:
        """See `Session`."""
        return self._line.waited

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> dict[str, Any]:
        """Ask, and wait for the answer; see `Session`."""
        del memory  # The server's own.
        if request["do"] == "score":
            return {"score": self._rewards}
        try:
            return self._answer(request, seconds)
        except SessionLostError as error:
            # An episode that can't be played again is a failed one, unless nothing has happened in it.
            if self._line.closed or self._settings.replayable or request["do"] == "begin":
                raise
            raise EpisodeFailedError(str(error)) from error

    def close(self) -> None:
        """Close the connection. Calls that wait for it end."""
        self._line.close()

    def _answer(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        do, longest = request["do"], self._settings.result_bytes
        if do == "begin":
            row = json.loads(json.dumps({"seed": request["seed"] % 2**31, **request["row"]}, default=str))
            try:
                return {"text": self._exchange("reset", row, seconds).text(longest) or None}
            except ServerError as error:
                raise EpisodeFailedError(f"raised in reset: {error}") from error
        if do == "call":
            action = {"type": "call_tool", "tool_name": request["name"], "arguments": request["arguments"]}
            try:
                return self._exchange("step", action, seconds).of_call(longest)
            except ServerError as error:
                fault = "wrong_arguments" if error.code == "VALIDATION_ERROR" else "raised"
                return {"fault": fault, "message": str(error)}
        read = self._actions.read(request["text"])
        if isinstance(read, str):
            return {"text": f"Error: {read}", "done": False, "fault": "unparsed"}
        try:
            answer = self._exchange("step", read, seconds)
        except ServerError as error:
            # The session goes on: servers raise at actions that an environment's type allows and its state does not.
            if (fault := _ACTION_FAULTS.get(error.code)) is None:
                raise EpisodeFailedError(f"raised in step: {error}") from error
            return {"text": f"Error: {error}", "done": False, "fault": fault}
        return {"text": answer.text(longest), "done": answer.done}

    def _exchange(self, kind: str, data: Mapping[str, Any], seconds: float) -> Answer:
        answer = read_answer(self._line.exchange(kind, data, seconds), kind)
        self._rewards += answer.reward
        if not math.isfinite(self._rewards):
            raise EpisodeFailedError("gave a reward that is not a finite number")
        return answer
