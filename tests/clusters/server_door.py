"""A way to an API server that can be shut, as if the server restarted."""

import asyncio

from tests.clusters.control_plane import ApiServer


class ServerDoor:
    """Listens on `port` of loopback once it is open."""

    def __init__(self, server: ApiServer) -> None:
        self._port = int(server.url.rpartition(":")[2])
        self._connections: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        self._listener = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._listener.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in list(self._connections):
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections |= {writer, far_writer}
        try:
            await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
        except asyncio.CancelledError:
            pass  # The loop ends.
        finally:
            self._connections -= {writer, far_writer}
            writer.transport.abort()
            far_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        writer.transport.abort()
