"""The operator's own HTTP endpoints: metrics for Prometheus, and liveness for the kubelet.

They are the operator's rather than kopf's, because a replica that does not lead is alive too.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from rlhfless_operator.controller.metrics import OperatorMetrics

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@asynccontextmanager
async def serve_metrics(metrics: OperatorMetrics, port: int) -> AsyncIterator[int]:
    """Serve `/metrics` on all addresses; yields the port."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=metrics.exposition(), headers={"Content-Type": _CONTENT_TYPE})

    async with _serve("/metrics", answer, port) as bound:
        yield bound


@asynccontextmanager
async def serve_liveness(stuck: Callable[[], list[str]], port: int) -> AsyncIterator[int]:
    """Serve `/healthz` on all addresses: 200, or 503 with the jobs that are stuck; yields the port."""

    async def answer(request: web.Request) -> web.Response:
        names = stuck()
        return web.json_response({"stuck": names}, status=503 if names else 200)

    async with _serve("/healthz", answer, port) as bound:
        yield bound


@asynccontextmanager
async def _serve(path: str, answer: Callable[[web.Request], object], port: int) -> AsyncIterator[int]:
    app = web.Application()
    app.router.add_get(path, answer)  # type: ignore[arg-type]
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "0.0.0.0", port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
