"""Hosts and sessions of episodes, on processes of this machine or on a server elsewhere."""

from typing import Any, Protocol


class EnvironmentUnusableError(Exception):
    """The environment can't be used at all; the message ends a sentence that begins with it."""


class EpisodeFailedError(Exception):
    """The environment failed; the message ends a sentence that begins with it."""

    retryable = False
    """Whether the same episode may succeed later."""


class EpisodeLateError(EpisodeFailedError):
    """A call took too long."""


class EpisodeUnreachableError(EpisodeFailedError):
    """Nothing answers where the environment should be."""

    retryable = True


class EpisodeKilledError(Exception):
    """Something outside ended the episode, and it may begin again."""

    remedy = "the kernel does this when memory runs out: use instances with more memory, or fewer samples for each"


class SessionLostError(EpisodeKilledError):
    """The server closed the connection, or the network lost it."""

    remedy = "look into the server's own log"


class Session(Protocol):
    """One episode that goes on."""

    @property
    def waited(self) -> float:
        """Return the seconds of its requests in which it waited for its beginning, and did nothing itself."""

    def ask(self, request: dict[str, Any], seconds: float, memory: int) -> dict[str, Any]:
        """Ask, and wait for the answer.

        Args:
            request: `do` and its arguments: `begin` (row, seed), `call` (name, arguments), `step` (text) or `score`.
            seconds: time limit.
            memory: most bytes that its processes may use together.

        Returns:
            `text` of the beginning; `result` of a call, or its `fault` with a `message` for the model; `text` of a step
            with `done`, and the `fault` of an action that can't be read; `score`. A call may be `done`, too.

        Raises:
            EpisodeLateError: it took longer.
            EpisodeFailedError: it raised, ended, used too much memory, or answered nonsense.
            EpisodeKilledError: something outside ended it.
        """

    def close(self) -> None:
        """End it. A thread that waits for an answer gets an error."""


class Host(Protocol):
    """Begins episodes."""

    schemas: list[dict[str, Any]]
    """JSON schemas of the tools."""
    is_game: bool
    """Whether the environment takes text, and has no tools."""

    def alive(self) -> bool:
        """Return whether it can still begin episodes."""

    def begin(self) -> Session:
        """Return a new session.

        Raises:
            EpisodeKilledError: the host is gone.
        """

    def close(self) -> None:
        """End it and all of its episodes."""
