"""What an ingress does with a request, and with an answer that breaks off."""

import aiohttp
from aiohttp import web


async def pass_on(request: web.Request, session: aiohttp.ClientSession, server: str) -> web.StreamResponse:
    """The answer of a server, as it comes; 502 where none begins. `server` is a URL without a path."""
    dropped = ("host", "connection", "transfer-encoding")
    headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
    response: web.StreamResponse | None = None
    try:
        # A body whose length nobody says may stay open until the answer has ended.
        body = await request.read() if "content-length" in request.headers else request.content.iter_any()
        async with session.request(request.method, f"{server}{request.path_qs}", headers=headers, data=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"content-type": answer.content_type})
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        return response
    except aiohttp.ClientError as error:
        if response is None:
            return web.Response(status=502, text=f"upstream: {error}")
        # Cut off without the last chunk.
        assert request.transport is not None
        request.transport.abort()
        return response
