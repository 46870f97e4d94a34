"""One function instance: an HTTP server that does one task at a time.

    POST /v1/run    a request of the wire contract; answered by a stream of newline-delimited JSON events. The body of a
                    live request stays open, and lines follow it
    POST /v1/sleep   give the device's memory back until the next request; answered when that is done
    GET  /v1/copies/COPY   whether the instance passes this copy of a published folder on
    GET  /v1/copies/COPY/FILE   one of its files, as far as it is there and then as it grows
    GET  /healthz   the process is alive
    GET  /readyz    the model is loaded (503 until then, and while draining)
    GET  /metrics   Prometheus

Closing a task's stream cuts the task: it publishes its partial results, and the instance is free. SIGTERM drains: the
task publishes its partial results, the stream ends with its terminal record, and the process exits.
"""

import asyncio
import hmac
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import generate_latest
from starlette.requests import ClientDisconnect

from rlhfless_functions.api import Failed, GenerationRequest, Preload, RunRequest, UnsupportedProtocolError, dump_event
from rlhfless_functions.artifacts.peers import PATH, copy_token
from rlhfless_functions.artifacts.relaying import growing_file, relayed
from rlhfless_functions.runtime.addresses import address_of
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.serving.function import Instance
from rlhfless_functions.serving.live_lines import Body, TooLongError

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 2**20
"""Largest request in bytes. A share of a million samples is about 40 MB."""
_KEEP_ALIVE_SECONDS = 600
"""Seconds that an idle connection is kept: longer than any client keeps one. Go's HTTP client keeps it for 90 s."""


def create_app(instance: Instance, *, token: str, max_request_bytes: int = MAX_REQUEST_BYTES) -> FastAPI:
    """Create the HTTP interface of an instance.

    Args:
        token: the job's token. Every request below /v1 carries it as a bearer token; a request for a copy carries that
            of `copy_token`.
        max_request_bytes: longer requests are refused with 413.
    """
    app = FastAPI(title=f"rlhfless {instance.stage}", docs_url=None, redoc_url=None, openapi_url=None)

    def occupied() -> Response | None:
        if instance.draining:
            return _refusal(503, "drained", "the instance is terminating", retryable=True)
        if instance.busy:
            return _refusal(409, "busy", "the instance is busy, and runs one task at a time", retryable=True)
        return None

    @app.post("/v1/run")
    async def run(http_request: Request) -> Response:
        if refusal := _stranger(http_request, token):
            return refusal
        body = Body(http_request.stream(), max_request_bytes)
        request = await _read_request(body, instance)
        if isinstance(request, Response):
            return request
        live = isinstance(request, GenerationRequest) and request.live is not None
        return occupied() or (_LiveResponse(instance, request, body) if live else _TaskResponse(instance, request))

    @app.post("/v1/sleep")
    async def sleep(http_request: Request) -> Response:
        if refusal := _stranger(http_request, token) or occupied():
            return refusal
        try:
            seconds = await instance.sleep()
        except Exception as error:
            message = f"the device's memory could not be released ({type(error).__name__}: {error}); the instance ends"
            return _refusal(500, "engine_lost", message, retryable=True)
        return JSONResponse({"seconds": seconds})

    _add_relay(app, instance, token)

    @app.get("/healthz")
    async def healthz() -> Response:
        return PlainTextResponse("ok")

    @app.get("/readyz")
    async def readyz() -> Response:
        ready = instance.ready and not instance.draining
        return JSONResponse({"ready": ready, "busy": instance.busy}, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(generate_latest(instance.registry), media_type="text/plain; version=0.0.4")

    return app


def _add_relay(app: FastAPI, instance: Instance, token: str) -> None:
    @app.get(f"{PATH}/{{copy}}")
    async def held_copy(http_request: Request, copy: str) -> Response:
        if refusal := _stranger(http_request, copy_token(token, copy)):
            return refusal
        found = relayed(copy) is not None and not instance.draining
        return JSONResponse({"relayed": found}, status_code=200 if found else 404)

    @app.get(f"{PATH}/{{copy}}/{{name:path}}")
    async def held_file(http_request: Request, copy: str, name: str) -> Response:
        if refusal := _stranger(http_request, copy_token(token, copy)):
            return refusal
        found = relayed(copy)
        if found is None or name not in found.files or instance.draining:
            return _refusal(404, "bad_request", "this instance has no such file to pass on")
        content = growing_file(found, name, lambda: instance.draining)
        return StreamingResponse(content, media_type="application/octet-stream")


def _stranger(http_request: Request, token: str) -> Response | None:
    offered = http_request.headers.get("authorization", "")
    if hmac.compare_digest(offered.encode(), f"Bearer {token}".encode()):
        return None
    return _refusal(401, "bad_request", "the bearer token is not this job's")


async def _read_request(body: Body, instance: Instance) -> RunRequest | Response:
    try:
        request = await body.request()
    except TooLongError as error:
        return _refusal(413, "bad_request", str(error))
    except UnsupportedProtocolError as error:
        return _refusal(400, "bad_request", str(error))
    except ValueError as error:
        return _refusal(422, "bad_request", f"the body is not a request of this contract: {error}")
    if request.key.stage != instance.stage:
        return _refusal(
            422, "bad_request", f"this is a {instance.stage} instance; the request is for {request.key.stage}"
        )
    return request


class _TaskResponse(StreamingResponse):
    """The stream of a task. The instance is taken from now until the stream ends, also if that never begins."""

    def __init__(self, instance: Instance, request: RunRequest, inbox: Inbox | None = None) -> None:
        super().__init__(instance.stream(request, inbox), media_type="application/x-ndjson")
        self._instance, self._taken = instance, instance.take()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._instance.give_up(self._taken)


class _LiveResponse(_TaskResponse):
    """The stream of a task whose request stays open. It is cut when the client is gone, or sends what is no line."""

    def __init__(self, instance: Instance, request: RunRequest, body: Body) -> None:
        self._inbox, self._body = Inbox(), body
        super().__init__(instance, request, self._inbox)

    async def listen_for_disconnect(self, receive: Any) -> None:
        """Read the lines that follow the request. Return when the client is gone."""
        try:
            await self._body.lines(self._inbox)
        except ClientDisconnect:
            return
        except (ValueError, TooLongError) as error:
            logger.warning("a live request is cut, because a line that followed it is not of this contract: %s", error)
            return
        await super().listen_for_disconnect(receive)


def _refusal(status: int, reason: Any, message: str, *, retryable: bool = False) -> Response:
    return Response(
        dump_event(Failed(reason=reason, message=message, retryable=retryable)),
        status_code=status,
        media_type="application/x-ndjson",
    )


class InstanceServer(uvicorn.Server):
    """uvicorn that reports when it listens, and drains the instance on SIGTERM before it closes."""

    def __init__(self, config: uvicorn.Config, instance: Instance, on_listening: Callable[[int], None]) -> None:
        super().__init__(config)
        self._instance = instance
        self._on_listening = on_listening

    async def startup(self, sockets: Any = None) -> None:
        """Bind, then report the port."""
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            with suppress(OSError):  # Without an address it passes nothing on.
                self._instance.address = f"http://{address_of(self.config.host)}:{port}"
            self._instance.listening()
            self._on_listening(port)

    async def on_tick(self, counter: int) -> bool:
        """End an instance that can't continue. An open stream is sent to its end."""
        self.should_exit = self.should_exit or self._instance.lost
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """End the streams, then wait until all is published, by a cut task or beside one. After this uvicorn raises the
        signal again, and a process that is not the first of its container dies of it."""
        await super().shutdown(sockets)
        await self._instance.idle()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain first; uvicorn then waits for the open stream to end."""
        if sig == signal.SIGTERM:
            self._instance.drain()
        super().handle_exit(sig, frame)


async def serve(
    instance: Instance,
    *,
    host: str,
    port: int,
    token: str,
    preload: Preload | None,
    on_listening: Callable[[int], None],
) -> None:
    """Serve until SIGTERM or SIGINT. A task that was cut or drained publishes before the process ends."""
    config = uvicorn.Config(
        create_app(instance, token=token),
        host=host,
        port=port,
        log_config=None,
        lifespan="off",
        access_log=False,
        # Knative's queue-proxy keeps connections, and it must be the one that closes them: a request on a connection
        # that is just being closed is lost.
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
    )
    server = InstanceServer(config, instance, on_listening)
    loading = asyncio.create_task(instance.start(preload))
    await server.serve()
    loading.cancel()
