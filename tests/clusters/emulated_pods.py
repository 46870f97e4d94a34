"""Pods of an emulated Knative whose functions do what `emulated_functions` does, over the wire contract."""

import asyncio
from collections.abc import Mapping

from aiohttp import web

from rlhfless_functions.api import Failed, GenerationRequest, Started, dump_event
from rlhfless_functions.runtime.inbox import Inbox
from rlhfless_functions.serving.live_lines import Body
from rlhfless_operator.platforms.base import TaskFailedError
from rlhfless_operator.platforms.live_request import LiveRequest
from rlhfless_operator.platforms.pods.manifests import PORT
from tests.clusters.emulated_functions import EmulatedPlatform, Emulation
from tests.clusters.running_functions import Launch, RunningFunction, listen


class EmulatedPodFunction:
    """The process of one pod: one task at a time, for any request with the job's token."""

    def __init__(self, name: str, token: str, emulation: Emulation) -> None:
        self._name = name
        self._token = token
        self._platform = EmulatedPlatform(emulation, lambda change: None)
        self._busy = False

    def app(self) -> web.Application:
        """Its HTTP face."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/run", self._run)
        app.router.add_post("/v1/sleep", self._sleep)
        app.router.add_get("/readyz", self._readyz)
        return app

    async def _sleep(self, request: web.Request) -> web.Response:
        return web.json_response({"seconds": 0.0}, status=409 if self._busy else 200)

    async def _readyz(self, request: web.Request) -> web.Response:
        return web.json_response({"ready": True, "busy": self._busy})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == f"Bearer {self._token}"
        if self._busy:
            refusal = Failed(reason="busy", message="one task at a time", retryable=True)
            return web.Response(status=409, body=dump_event(refusal))
        body = Body(request.content.iter_any(), 2**26)
        task = await body.request()
        if isinstance(task, GenerationRequest) and task.live is not None:
            task = LiveRequest.of(task)
            reading = asyncio.create_task(body.lines(_Lines(task)))
        else:
            reading = None
        response = web.StreamResponse(headers={"content-type": "application/x-ndjson"})
        self._busy = True
        try:
            await response.prepare(request)
            async for event in self._platform.run(task):
                named = Started(instance=self._name) if isinstance(event, Started) else event
                await response.write(dump_event(named))
        except TaskFailedError as error:
            await response.write(dump_event(Failed(reason=error.reason, message=str(error), retryable=error.retryable)))
        finally:
            self._busy = False
            if reading is not None:
                reading.cancel()
        return response


class _Lines(Inbox):
    """Hands lines that arrive on to a live request."""

    def __init__(self, request: LiveRequest) -> None:
        super().__init__()
        self.put = request.send  # type: ignore[method-assign]
        self.close = request.end  # type: ignore[method-assign]


def emulated_pods(emulation: Emulation) -> Launch:
    """Starts a pod's function in this process, at an address of its own."""

    async def launch(name: str, environment: Mapping[str, str]) -> RunningFunction:
        function = EmulatedPodFunction(name, environment["RLHFLESS_TOKEN"], emulation)
        host, end = await listen(function.app())
        return RunningFunction(host, PORT, end, end)

    return launch
