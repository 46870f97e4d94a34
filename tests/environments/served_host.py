"""A server of the user's environments in a thread, and a client of it."""

import asyncio
import socket
import threading

from aiohttp import web

from rlhfless_functions.environments.served import ServedHost
from rlhfless_functions.environments.server import EnvironmentServer
from rlhfless_functions.settings import EnvironmentSettings


class ServerThread:
    """Serves the environments of a job on a free port."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.server = EnvironmentServer(settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            port = listener.getsockname()[1]
        self._runner = web.AppRunner(self.server.app(), shutdown_timeout=1.0)
        asyncio.run_coroutine_threadsafe(self._start(port), self._loop).result()

    def close(self) -> None:
        """End it with all episodes."""
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.server.close()

    async def _start(self, port: int) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()


class HostOnServer(ServedHost):
    """A client with a server of its own."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self.thread = ServerThread(settings)
        served = {"url": self.thread.url}
        super().__init__(EnvironmentSettings.model_validate({**settings.model_dump(), "served": served}))

    def close(self) -> None:
        """End both; the constructor does so, too, if there is nothing to serve."""
        super().close()
        self.thread.close()
