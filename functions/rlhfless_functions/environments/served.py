"""The user's own environments on a server of rlhfless: a client of `server`. One connection is one episode."""

import json
from typing import Any

from rlhfless_functions.environments.connections import Line, Server
from rlhfless_functions.environments.host import FORK_SECONDS, LOAD_SECONDS
from rlhfless_functions.environments.openenv_messages import short
from rlhfless_functions.environments.sessions import (
    EnvironmentUnusableError,
    EpisodeFailedError,
    EpisodeKilledError,
    EpisodeLateError,
    SessionLostError,
)
from rlhfless_functions.settings import EnvironmentSettings

_REMEDY = "environment.served.url is the address of `python -m rlhfless_functions.environments.server`, without /ws"
_SLACK = 10.0
"""Seconds by which an answer may come later than the server's own limit."""
_ERRORS: dict[str, type[Exception]] = {
    "UNUSABLE": EnvironmentUnusableError,
    "LATE": EpisodeLateError,
    "KILLED": EpisodeKilledError,
}
"""Errors of the server, and their names here. All others are `EpisodeFailedError`."""


class ServedHost:
    """A server of the user's environments. The constructor connects once, to learn what tools it has.

    Args:
        settings: the job's environment, with `served`.

    Raises:
        EnvironmentUnusableError: the files can't be used, nothing answers there, or something else does.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        served = settings.served
        assert served is not None and served.url is not None
        self._server = Server(settings, served.url, served.start_limit, _REMEDY)
        line = Line(self._server)
        try:
            told = _read(line.exchange("describe", None, LOAD_SECONDS + _SLACK), "description")
            self.schemas: list[dict[str, Any]] = told["schemas"]
            self.is_game: bool = told["game"]
        except (EpisodeFailedError, SessionLostError) as error:
            self.close()
            raise EnvironmentUnusableError(str(error)) from error
        except BaseException:
            self.close()
            raise
        line.close()

    def alive(self) -> bool:
        """Return whether it can begin episodes."""
        return self._server.alive()

    def begin(self) -> "ServedSession":
        """Return a new session, which connects with its first request."""
        return ServedSession(self._server)

    def close(self) -> None:
        """Close all connections."""
        self._server.close()


class ServedSession:
    """An episode on a server; see `Session`.

    Args:
        server: connects.
    """

    def __init__(self, server: Server) -> None:
        self._line = Line(server)
        self._forking = 0.0

    @property
    def waited(self) -> float:
        """See `Session`."""
        return self._line.waited + self._forking

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> dict[str, Any]:
        """Ask, and wait for the answer; see `Session`."""
        del memory  # The server knows it.
        asked = json.loads(json.dumps({"request": request, "seconds": seconds}, default=str))
        limit = seconds + FORK_SECONDS + _SLACK + (LOAD_SECONDS if request["do"] == "begin" else 0.0)
        try:
            answer = self._line.exchange("ask", asked, limit)
        except EpisodeLateError:
            # The server keeps the limit itself, and says so.
            raise SessionLostError("lost its server, which does not answer any more") from None
        try:
            told = _read(answer, "answer")
        except EnvironmentUnusableError as error:
            raise EpisodeFailedError(str(error)) from error
        self._forking += told["waited"]
        return dict(told["answer"])

    def close(self) -> None:
        """Close the connection. Calls that wait for it end."""
        self._line.close()


def _read(text: str, wanted: str) -> dict[str, Any]:
    """Return what an answer has.

    Raises:
        EpisodeFailedError: it is not a message of the protocol. The other errors are those of `Session`.
    """
    try:
        message = json.loads(text)
        data = message["data"]
        if message["type"] == wanted:
            return dict(data)
        if message["type"] == "error":
            raise _ERRORS.get(data["code"], EpisodeFailedError)(str(data["message"]))
    except (ValueError, RecursionError, TypeError, KeyError):
        pass
    raise EpisodeFailedError(f"answered what rlhfless's own server does not ({short(text)}); {_REMEDY}")
