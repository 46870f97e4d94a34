"""Links with a rate: proxies that let so many bytes a second through."""

import fcntl
import os
import socket
import threading
import time

DELAY_SECONDS = 0.01
"""Delay of a connection's first bytes."""
_CHUNK = 2**18


class Link:
    """A proxy that lets a number of bytes a second through from a server to all of its readers together.

    Args:
        server: its host and port.
        rate: the number of bytes.
        uploads: whether what is sent to the server has to share them.
    """

    def __init__(self, server: tuple[str, int], rate: float, *, uploads: bool = False) -> None:
        self._server, self._rate, self._uploads = server, rate, uploads
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.address = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            reader, _ = self._listening.accept()
            server = socket.create_connection(self._server)
            threading.Thread(target=self._pass, args=(reader, server, self._uploads), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, reader, True), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, metered: bool) -> None:
        out, into = os.pipe()
        fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, _CHUNK)
        try:
            if metered:
                time.sleep(DELAY_SECONDS)
            # Through a pipe, the bytes stay in the kernel.
            while size := os.splice(source.fileno(), into, _CHUNK, flags=os.SPLICE_F_MOVE):
                if metered:
                    self._wait(size)
                while size:
                    size -= os.splice(out, target.fileno(), size, flags=os.SPLICE_F_MOVE)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            source.close()
            target.close()
        finally:
            os.close(out)
            os.close(into)

    def _wait(self, size: int) -> None:
        with self._lock:
            now = time.monotonic()
            # A sender that was late for lack of processor time may make good a quarter of a second.
            self._free_at = max(self._free_at, now - 0.25) + size / self._rate
            left = self._free_at - now
        if left > 0:
            time.sleep(left)
