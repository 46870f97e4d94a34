"""The environment of a job's samples: its code, its tools and its limits."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhfless_functions.settings.base import Bytes, Duration, Settings

_URL = r"^(https?|wss?)://[^\s/]\S*$"
_ANSWER, _START = 10.0, 300.0
"""Seconds within which a server answers that runs already, and one that the job runs."""
_EPISODES = 16
_SERVE = ("python", "-P", "-m", "rlhfless_functions.environments.server")
_TO_SERVE = {"python", "tools", "tool_seconds", "memory", "result_bytes"}
"""Settings that the server of a job's own environments needs."""


class PythonEnvironment(Settings):
    """A Python class of yours. Each sample has an object of it."""

    file: str = Field(min_length=1)
    """Path (relative to the job file) or fsspec URI of the Python file."""
    class_name: str = Field(alias="class", min_length=1)
    """Name of the class in that file. `reset(**row)` begins an episode, all other public methods are tools, and
    `get_reward()` scores it, as in TRL. A class with `step(text)` is a text game without tools."""


class OpenEnvEnvironment(Settings):
    """A server of OpenEnv. Each sample has a session of its own. Either the server runs already, and `url` is its
    address, or the job runs it, from `image`, `command` or both."""

    url: str | None = Field(default=None, pattern=_URL, max_length=2000)
    """Address of a server that runs already, such as `http://maze.environments:8000`."""
    image: str | None = Field(default=None, min_length=1, max_length=1000)
    """Container image of a server that the job runs on a cluster; by default that of the functions. `rlhfless run`
    ignores it, and needs `command`."""
    command: list[Annotated[str, Field(max_length=4000)]] | None = Field(default=None, min_length=1, max_length=256)
    """Command that starts the server, such as `[uvicorn, "maze:app", --host, $(HOST), --port, $(PORT)]`; on a cluster
    by default the image's own. Environment variables and `$(NAME)` in the command name the address to listen on (`HOST`
    and `PORT`) and the most sessions (`MAX_CONCURRENT_ENVS`, which is `sessions`)."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Port on which the server in the container listens; by default 8000. `rlhfless run` chooses a free one."""
    sessions: int | None = Field(default=None, ge=1, le=1000)
    """Most sessions of one container; by default 1, as of OpenEnv. The server must allow as many."""
    containers: int | None = Field(default=None, ge=1, le=1000)
    """Most containers on a cluster; by default 16. There are as many as the open sessions need, and none without
    sessions. `rlhfless run` starts one process, which needs as many sessions as there are samples under way."""
    start_seconds: Duration | None = None
    """Longest wait for the server's first answer; by default 10s, and 5m if the job runs it."""

    @property
    def runs(self) -> bool:
        """Whether the job runs the server."""
        return self.url is None

    @property
    def start_limit(self) -> float:
        """Longest wait for the server's first answer, in seconds."""
        return self.start_seconds or (_START if self.runs else _ANSWER)

    @model_validator(mode="after")
    def _has_a_server(self) -> Self:
        own = {
            "image": self.image,
            "command": self.command,
            "port": self.port,
            "sessions": self.sessions,
            "containers": self.containers,
        }
        given = [name for name, value in own.items() if value is not None]
        if self.url is not None and given:
            raise ValueError(f"openenv.url is a server that runs already; remove url, or {', '.join(given)}")
        if self.runs and self.image is None and self.command is None:
            raise ValueError("openenv needs url, image or command; write the address of a server, or how to start one")
        return self

    def at(self, url: str) -> Self:
        """Return this environment with the address of the server that the job runs."""
        return type(self)(url=url, start_seconds=self.start_limit)


class ServedEnvironment(Settings):
    """The class and the tools run on CPUs of their own, and not beside the engine. Either their server runs already,
    and `url` is its address, or the job runs it."""

    url: str | None = Field(default=None, pattern=_URL, max_length=2000)
    """Address of a server that runs already: `python -m rlhfless_functions.environments.server`."""
    image: str | None = Field(default=None, min_length=1, max_length=1000)
    """Container image on a cluster, by default that of the functions. It must have what the files import, and
    rlhfless's functions. `rlhfless run` ignores it."""
    sessions: int | None = Field(default=None, ge=1, le=1000)
    """Most episodes of one container on a cluster; by default 16."""
    containers: int | None = Field(default=None, ge=1, le=1000)
    """Most containers on a cluster; by default 16. There are as many as the open episodes need, and none without
    episodes. `rlhfless run` starts one process for all."""
    start_seconds: Duration | None = None
    """Longest wait for the server's first answer; by default 10s, and 5m if the job runs it."""

    @property
    def start_limit(self) -> float:
        """Longest wait for the server's first answer, in seconds."""
        return self.start_seconds or (_START if self.url is None else _ANSWER)

    @model_validator(mode="after")
    def _has_one_server(self) -> Self:
        own = {"image": self.image, "sessions": self.sessions, "containers": self.containers}
        given = [name for name, value in own.items() if value is not None]
        if self.url is not None and given:
            raise ValueError(f"served.url is a server that runs already; remove url, or {', '.join(given)}")
        return self


ToolFunction = Annotated[str, Field(pattern=r"^[^:].*\.py:[A-Za-z_][A-Za-z0-9_]*$", max_length=1000)]
"""A function of a file, written `file.py:function`."""


class EnvironmentSettings(Settings):
    """Where the model acts in several turns: an environment, tools, or both."""

    python: PythonEnvironment | None = None
    """A class of your own."""
    openenv: OpenEnvEnvironment | None = None
    """A server of OpenEnv, instead of a class."""
    tools: list[ToolFunction] = Field(default=[], max_length=64)
    """Functions that the model may call, each `file.py:function`; paths are relative to the job file. Their type hints
    and docstrings become the schema."""
    served: ServedEnvironment | None = None
    """Runs the class and the tools on CPUs of their own; by default they run beside the engine. `{}` is enough. Their
    files must be where the server runs."""
    max_turns: int = Field(default=16, ge=1, le=1000)
    """Most turns of the model in an episode. Then it is scored as it is, as at `sampling.maxResponseTokens`, which
    limits a whole episode."""
    tool_seconds: Duration = Field(default=60.0)
    """Time limit of one call of the environment. A call that exceeds it ends its process, and so the episode."""
    episode_seconds: Duration = Field(default=600.0)
    """Time limit of all calls of an episode together."""
    on_failure: Literal["score", "drop", "fail"] = "score"
    """What becomes of an episode whose environment exceeds its time or memory, raises outside a tool, or ends its
    process. `score` gives it 0, `drop` leaves its sample without any reward, and `fail` ends the job. Each is counted.
    An environment that can't begin an episode always ends the job."""
    replayable: bool = False
    """Whether the same calls give the same results again, for the same row and seed. Then an episode goes on after a
    kill; otherwise it begins anew."""
    let_go: Literal["auto", "never"] = "auto"
    """Whether an instance of generation is let go while all of its samples wait for their environments. `auto` does so
    once the environments have been seen to take longer than letting an instance go and having one again. The episodes
    then go on in a process of their own; on a cluster, in a pod on CPUs."""
    memory: Bytes = 2**30
    """Memory limit of an episode's processes."""
    result_bytes: Bytes = Field(default=2**14)
    """Most bytes of a tool's result; the rest is cut off, and the model is told so."""

    @property
    def files(self) -> list[str]:
        """The user's files, each once."""
        own = [] if self.python is None else [self.python.file]
        return list(dict.fromkeys([*own, *(tool.rpartition(":")[0] for tool in self.tools)]))

    @property
    def server(self) -> OpenEnvEnvironment | None:
        """The server that the job runs; None if it runs none."""
        served = self.served
        if served is None:
            return self.openenv if self.openenv is not None and self.openenv.runs else None
        if served.url is not None:
            return None
        return OpenEnvEnvironment(
            image=served.image,
            command=[*_SERVE, self.model_dump_json(include=_TO_SERVE)],
            sessions=served.sessions or _EPISODES,
            containers=served.containers,
            start_seconds=served.start_seconds,
        )

    @property
    def is_scored(self) -> bool:
        """Whether episodes begin with a text and end with a score, as tools alone don't."""
        return self.python is not None or self.openenv is not None

    def at(self, url: str) -> Self:
        """Return these settings with the address of the server that the job runs."""
        if self.openenv is not None:
            return self.model_copy(update={"openenv": self.openenv.at(url)})
        assert self.served is not None
        served = ServedEnvironment(url=url, start_seconds=self.served.start_limit)
        return self.model_copy(update={"served": served})

    @model_validator(mode="after")
    def _has_something(self) -> Self:
        if self.openenv is not None and self.served is not None:
            raise ValueError("environment.served is for a class and tools of your own; remove it, or openenv")
        if self.openenv is not None and (self.python is not None or self.tools):
            raise ValueError("environment.openenv has its own tools; remove environment.python and environment.tools")
        if not self.is_scored and not self.tools:
            raise ValueError("environment needs python, openenv or tools; it has none")
        return self
