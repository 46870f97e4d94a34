"""A small server that speaks OpenEnv's WebSocket, with faults on request: a total that tools or steps change.

`python -m tests.environments.openenv_server [SECONDS]` serves it on HOST and PORT; an action takes so long.
"""

import asyncio
import json
import os
import sys
import threading
from types import TracebackType
from typing import Any

from aiohttp import WSMsgType, web

ADD = {
    "name": "add",
    "description": "Add to the total.",
    "input_schema": {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]},
}
ACTION = {
    "properties": {"metadata": {"type": "object"}, "amount": {"type": "integer", "title": "Amount"}},
    "required": ["amount"],
}


class Server:
    """Runs in a thread, and serves `ws://…/ws` and `/schema`.

    Args:
        tools: whether the total has a tool, or takes actions.
        capacity: most sessions.
        speaks: `openenv`, `http` (no WebSocket, as before 0.2), `other` (messages of another protocol), `greets` (sends
            a message before it is asked), or `nothing` (closes each connection).
        delay: seconds that an action takes.
        held: whether further handshakes wait for room, as at Knative's activator.
    """

    def __init__(
        self,
        *,
        tools: bool = True,
        capacity: int = 64,
        speaks: str = "openenv",
        delay: float = 0.0,
        held: bool = False,
    ) -> None:
        self.held = held
        self.handshakes = 0
        self.refusals: list[int] = []
        """The statuses that answer the next handshakes."""
        self.delay = delay
        self.tools = tools
        self.capacity = capacity
        self.speaks = speaks
        self.open = 0
        self.most_open = 0
        self.begun: list[dict[str, Any]] = []
        """The data of every reset."""
        self.host = "127.0.0.1"
        self.port = 0
        self.drops = 0
        """How often an amount of 13 still drops the connection; -1: always."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Server":
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def start(self) -> None:
        """Listen, at the same port as before."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    def stop(self) -> None:
        """Drop every connection, and listen no more."""
        if self._runner is not None:
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
            self._runner = None

    async def _start(self) -> None:
        app = web.Application()
        if self.speaks != "http":
            app.router.add_get("/ws", self._session)
        app.router.add_get("/schema", self._schema)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        self.port = self._runner.addresses[0][1]

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": ACTION, "observation": {}, "state": {}})

    async def _session(self, request: web.Request) -> web.StreamResponse:
        self.handshakes += 1
        if self.refusals:
            return web.Response(status=self.refusals.pop())
        while self.held and self.open >= self.capacity:
            if request.transport is None or request.transport.is_closing():
                return web.Response()
            await asyncio.sleep(0.005)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.speaks == "greets":
            await _observe(socket, {"said": "welcome"})
        if self.speaks == "nothing":
            await socket.close()
            return socket
        if self.open >= self.capacity:
            await _send(socket, "error", message="Server at capacity: 1/1 sessions", code="CAPACITY_REACHED")
            await socket.close()
            return socket
        self.open += 1
        self.most_open = max(self.open, self.most_open)
        try:
            await self._talk(socket)
        finally:
            self.open -= 1
        return socket

    async def _talk(self, socket: web.WebSocketResponse) -> None:
        total = 0
        async for message in socket:
            if message.type != WSMsgType.TEXT:
                break
            said = json.loads(message.data)
            kind, data = said["type"], said.get("data", {})
            if self.speaks == "other":
                await socket.send_str('{"jsonrpc": "2.0", "result": 1}')
            elif kind == "close":
                break
            elif kind == "state":
                await _send(socket, "state", step_count=0)
            elif kind == "reset":
                total = data.get("start", 0)
                self.begun.append(data)
                text = f"={total}" if total else f" Reach {data.get('goal', 3)}."
                await _observe(socket, {"said": text, "none": None, "metadata": {"a": 1}})
            elif data.get("type") == "list_tools" and self.tools:
                await _observe(socket, {"tools": [ADD]})
            elif (amount := self._amount(data)) is None:
                await self._refuse(socket, data)
            else:
                total += amount if amount != 16 else 0
                await asyncio.sleep(self.delay)
                if not await self._acted(socket, amount, total):
                    break

    def _amount(self, data: dict[str, Any]) -> int | None:
        if self.tools:
            data = data["arguments"] if data.get("tool_name") == "add" else {}
        return data.get("amount") if set(data) == {"amount"} and isinstance(data["amount"], int) else None

    async def _refuse(self, socket: web.WebSocketResponse, data: dict[str, Any]) -> None:
        if not self.tools:
            errors = [{"loc": ["amount"], "msg": "Input should be a valid integer"}]
            await _send(socket, "error", message="Invalid message", code="VALIDATION_ERROR", errors=errors)
            return
        kind = "invalid_args" if data.get("tool_name") == "add" else "tool_not_found"
        await _observe(socket, {"tool_name": "x", "result": None, "error": {"error_type": kind, "message": "no"}})

    async def _acted(self, socket: web.WebSocketResponse, amount: int, total: int) -> bool:
        """Answer; return whether the connection goes on. Some amounts are faults."""
        if amount == 13 and self.drops:
            self.drops -= 1
            return False
        if amount == 14:
            await asyncio.sleep(3600)
        if amount == 15:
            await socket.send_str("nonsense")
            return True
        if amount == 16:
            await _send(socket, "error", message="division by zero", code="EXECUTION_ERROR")
            return True
        if amount == 18:
            await _observe(socket, {"total": 0})
        if amount == 17:
            await _observe(socket, {"total": "x" * 2**20})
            return True
        seen: dict[str, Any] = {"total": total}
        if self.tools:
            content = [{"type": "text", "text": str(total)}]
            seen = {"tool_name": "add", "result": {"content": content, "data": total, "is_error": False}, "error": None}
        await _observe(socket, seen, reward=0.5 if total == 3 else None, done=total == 3)
        return True


async def _send(socket: web.WebSocketResponse, kind: str, **data: Any) -> None:
    await socket.send_str(json.dumps({"type": kind, "data": data}))


async def _observe(
    socket: web.WebSocketResponse, observation: dict[str, Any], reward: float | None = None, *, done: bool = False
) -> None:
    await _send(socket, "observation", observation=observation, reward=reward, done=done)


def main() -> None:
    """Serve until killed."""
    delay = float(sys.argv[1]) if len(sys.argv) > 1 else 0.0
    server = Server(delay=delay, capacity=int(os.environ["MAX_CONCURRENT_ENVS"]))
    server.host, server.port = os.environ["HOST"], int(os.environ["PORT"])
    with server:
        threading.Event().wait()


if __name__ == "__main__":
    main()
