"""A shelter of episodes: `python -m rlhfless_functions.environments.shelter [PARENT]`.

It plays the episodes of rollouts without a GPU. So an actor whose samples all wait can be let go. With a parent, it
listens on loopback, writes its port as a line on standard output, and ends with its parent. In a pod, it listens on all
addresses at PORT. The token is in RLHFLESS_TOKEN. In a rehearsal, the emulated GPUs of RLHFLESS_EMULATION say how long
the environments take.

    GET  /healthz       whether it listens
    POST /v1/exchange   turns of an actor's samples; answered with the observations that have come for it, and with the
                        samples that it awaits in vain: their turns are not here any more
    POST /v1/come       the samples of a rollout whose answers have come, or whose episodes are not here
    POST /v1/end        end the episodes of a rollout

A turn may be handed over again by another actor. It is answered once, and each actor gets the same answer.
"""

import asyncio
import hmac
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from rlhfless_functions.environments.episodes import Observation, SampleKey, Turn
from rlhfless_functions.runtime import logs
from rlhfless_functions.runtime.processes import die_with_parent, name_process
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EnvironmentSettings, ModelSettings
from rlhfless_functions.settings.emulation import EmulationSettings

_log = logging.getLogger("rlhfless.environments")

_WAIT_SECONDS = 0.1
"""Longest wait of an exchange for an answer: turns that end meanwhile wait for the next one."""
_COME_SECONDS = 5.0
"""Longest wait for an answer while an actor is let go."""


class KeptEpisodes(Protocol):
    """Episodes that can be forgotten one by one; `PlayedEpisodes` are."""

    def submit(self, turn: Turn) -> None:
        """Hand a turn over; see `Episodes`."""

    def ready(self, wait_seconds: float) -> list[Observation]:
        """Return the answers that have come; see `Episodes`."""

    def forget(self, sample: SampleKey) -> None:
        """End a sample's session."""

    def close(self) -> None:
        """End all episodes."""


Make = Callable[[EnvironmentSettings, ModelSettings, Mapping[str, Any], int], KeptEpisodes]


class _Exchange(BaseModel):
    model_config = ConfigDict(extra="forbid")

    rollout: str
    actors: int
    environment: EnvironmentSettings
    model: ModelSettings
    chat_template_kwargs: dict[str, Any]
    turns: list[Turn]
    awaited: list[SampleKey]


class _Come(BaseModel):
    rollout: str
    samples: list[SampleKey]


class _End(BaseModel):
    rollout: str


@dataclass
class _Kept:
    """A sample's newest turn, and what became of it."""

    turn: Turn
    answer: Observation | None = None
    following: Turn | None = None
    """Another turn that was handed over while this one was with its environment."""

    def leads_to(self, turn: Turn) -> bool:
        """Return whether a turn goes on from this one's answer."""
        if self.answer is None:
            return False
        before = [] if self.answer.restarted else list(self.turn.response)
        before += self.answer.tokens
        return len(turn.response) > len(before) and list(turn.response[: len(before)]) == before

    def begins_anew(self, turn: Turn) -> bool:
        """Return whether a turn is the first one of an episode that began anew. It may well be this turn again, because
        a sample's random numbers are those of its positions."""
        if self.answer is None or not self.answer.restarted:
            return False
        return self.leads_to(turn) and len(turn.given) <= bool(self.answer.tokens)


class _Rollout:
    """The episodes of a rollout. All methods but `_listen` belong to the event loop."""

    def __init__(self, episodes: KeptEpisodes) -> None:
        self._episodes = episodes
        self._kept: dict[SampleKey, _Kept] = {}
        self._changed = asyncio.Event()
        self._error: Exception | None = None
        self._closed = False
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._listen, name="answers", daemon=True).start()

    def submit(self, turn: Turn) -> None:
        """Hand a turn over, unless it has been."""
        kept = self._kept.get(turn.sample)
        if kept is None:
            self._begin(turn)
        elif list(kept.turn.response) == list(turn.response) and not kept.begins_anew(turn):
            kept.following = None
        elif kept.answer is None:
            kept.following = turn
        else:
            if not kept.leads_to(turn):
                # Another actor goes on from an earlier place: the session is ahead of it.
                self._episodes.forget(turn.sample)
            self._begin(turn)

    def lost(self, samples: Iterable[SampleKey]) -> list[SampleKey]:
        """Return the samples of which there is no turn."""
        return [key for key in samples if key not in self._kept]

    async def answers(self, samples: Iterable[SampleKey], seconds: float) -> list[Observation]:
        """Return the answers of some samples that are there; wait for the first one no longer than this.

        Raises:
            TaskError: the environment fails, and the job is to end.
        """
        wanted = list(samples)

        def found() -> list[Observation]:
            kept = [self._kept[key] for key in wanted if key in self._kept]
            return [each.answer for each in kept if each.answer is not None]

        await self._until(lambda: bool(found()), seconds)
        return found()

    async def come(self, samples: Sequence[SampleKey], seconds: float) -> list[SampleKey]:
        """Return the samples that need not be waited for: they are answered, unknown here, or have failed."""

        def found() -> list[SampleKey]:
            if self._error is not None:
                return list(samples)
            return [key for key in samples if key not in self._kept or self._kept[key].answer is not None]

        await self._until(lambda: bool(found()), seconds, raises=False)
        return found()

    def close(self) -> None:
        """End the episodes."""
        self._closed = True
        self._episodes.close()

    async def _until(self, there: Callable[[], bool], seconds: float, *, raises: bool = True) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not there():
                    if self._error is not None and raises:
                        raise self._error
                    await self._changed.wait()
        except TimeoutError:
            return

    def _begin(self, turn: Turn) -> None:
        self._kept[turn.sample] = _Kept(turn)
        self._episodes.submit(turn)

    def _answered(self, answers: Sequence[Observation]) -> None:
        for answer in answers:
            kept = self._kept[answer.sample]
            if kept.following is not None:
                self._episodes.forget(answer.sample)
                self._begin(kept.following)
            else:
                kept.answer = answer
        self._tell()

    def _failed(self, error: Exception) -> None:
        self._error = error
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _listen(self) -> None:
        while not self._closed:
            try:
                answers = self._episodes.ready(_WAIT_SECONDS)
            except Exception as error:
                self._loop.call_soon_threadsafe(self._failed, error)
                return
            if answers:
                self._loop.call_soon_threadsafe(self._answered, answers)


class Shelter:
    """The rollouts whose episodes are here.

    Args:
        make: makes the episodes of a job's environment.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._rollouts: dict[str, _Rollout] = {}
        self._ended: set[str] = set()
        self._making = asyncio.Lock()

    async def exchange(self, body: bytes) -> dict[str, Any]:
        """Take turns in, and return answers.

        Raises:
            TaskError: the environment fails, or the rollout has ended.
            ValueError: the body is nothing that an actor says.
        """
        # `model_validate_json` would make None of a NaN in a row, and refuses half of a pair of surrogates.
        asked = _Exchange.model_validate(json.loads(body))
        async with self._making:
            if asked.rollout in self._ended:
                raise TaskError("environment_failed", f"rollout {asked.rollout} has ended", retryable=True)
            rollout = self._rollouts.get(asked.rollout)
            if rollout is None and asked.turns:
                make, arguments = self._make, (asked.environment, asked.model, asked.chat_template_kwargs, asked.actors)
                rollout = self._rollouts[asked.rollout] = _Rollout(await asyncio.to_thread(make, *arguments))
        if rollout is None:
            return {"observations": [], "lost": asked.awaited}
        try:
            for turn in asked.turns:
                rollout.submit(turn)
            # Another actor may have been told of a failure, with which all episodes ended.
            if lost := rollout.lost(asked.awaited):
                return {"observations": [], "lost": lost}
            answers = await rollout.answers(asked.awaited, _WAIT_SECONDS)
        except Exception as error:
            # The next attempt begins with fresh episodes.
            await self._drop(asked.rollout, rollout)
            if isinstance(error, TaskError):
                raise
            _log.exception("the episodes of rollout %s failed", asked.rollout)
            raise TaskError("environment_failed", f"the process of the episodes: {error!r}", retryable=True) from error
        return {"observations": [asdict(answer) for answer in answers], "lost": []}

    async def come(self, asked: _Come) -> dict[str, Any]:
        """Return the samples that need not be waited for."""
        rollout = self._rollouts.get(asked.rollout)
        return {"samples": asked.samples if rollout is None else await rollout.come(asked.samples, _COME_SECONDS)}

    async def end(self, rollout: str) -> None:
        """End a rollout's episodes for good: a late actor begins no others."""
        async with self._making:
            self._ended.add(rollout)
        if (found := self._rollouts.get(rollout)) is not None:
            await self._drop(rollout, found)

    async def _drop(self, name: str, rollout: _Rollout) -> None:
        if self._rollouts.get(name) is rollout:
            del self._rollouts[name]
            await asyncio.to_thread(rollout.close)


def create_app(shelter: Shelter, token: str) -> FastAPI:
    """Create the HTTP interface of a shelter."""
    app = FastAPI(title="rlhfless shelter", docs_url=None, redoc_url=None, openapi_url=None)

    def stranger(request: Request) -> Response | None:
        told = request.headers.get("authorization", "").encode()
        if hmac.compare_digest(told, f"Bearer {token}".encode()):
            return None
        return JSONResponse({"message": "the token is wrong"}, status_code=401)

    @app.get("/healthz")
    async def healthz() -> Response:
        return JSONResponse({})

    @app.post("/v1/exchange")
    async def exchange(request: Request) -> Response:
        if refusal := stranger(request):
            return refusal
        try:
            # NaN is no JSON for strict writers.
            answer = json.dumps(await shelter.exchange(await request.body()))
            return Response(answer, media_type="application/json")
        except TaskError as error:
            told = {"reason": error.reason, "message": str(error), "retryable": error.retryable}
            return JSONResponse(told, status_code=409)
        except ValueError as error:
            return JSONResponse({"message": str(error)}, status_code=400)

    @app.post("/v1/come")
    async def come(request: Request) -> Response:
        if refusal := stranger(request):
            return refusal
        return JSONResponse(await shelter.come(_Come.model_validate_json(await request.body())))

    @app.post("/v1/end")
    async def end(request: Request) -> Response:
        if refusal := stranger(request):
            return refusal
        await shelter.end(_End.model_validate_json(await request.body()).rollout)
        return JSONResponse({})

    return app


async def _serve(token: str, place: tuple[str, int], listens: Callable[[int], None]) -> None:
    with socket.create_server(place) as listener:
        app = create_app(Shelter(_maker()), token)
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off"))
        listens(listener.getsockname()[1])
        await server.serve(sockets=[listener])


def _maker() -> Make:
    """Return what makes the episodes. A rehearsal needs none of the libraries that real ones do."""
    if emulation := os.environ.get("RLHFLESS_EMULATION"):
        from rlhfless_functions.environments.emulated import EmulatedEpisodeMaker

        return EmulatedEpisodeMaker(EmulationSettings.model_validate_json(emulation)).make
    from rlhfless_functions.environments.making import EpisodeMaker

    return EpisodeMaker().make


def main() -> None:
    """Serve until the parent ends, or until SIGTERM."""
    name_process("shelter")
    logs.configure(instance="shelter")
    token = os.environ["RLHFLESS_TOKEN"]
    if len(sys.argv) < 2:
        asyncio.run(_serve(token, ("0.0.0.0", int(os.environ["PORT"])), lambda port: None))
        return
    die_with_parent(int(sys.argv[1]))
    port_to = os.dup(1)
    os.dup2(2, 1)

    def tell(port: int) -> None:
        os.write(port_to, f"{port}\n".encode())

    asyncio.run(_serve(token, ("127.0.0.1", 0), tell))


if __name__ == "__main__":
    main()
