"""Frames on a stream socket: eight bytes of length, then the payload.

Workers talk to their parent only over the socket, so rewards may print anything. Requests are pickled, because the
parent is trusted; answers are JSON, because the worker is not.
"""

import socket
import struct

_LENGTH = struct.Struct("!Q")
LARGEST_ANSWER = 64 * 2**20
"""Bytes of the largest answer that a parent accepts."""


class ChannelError(Exception):
    """The bytes are not frames: something else wrote to the socket."""


def send(connection: socket.socket, payload: bytes) -> None:
    """Send one frame; blocks until it is sent or the socket's timeout is over."""
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes | None:
    """Wait for one frame; None once the other side has closed the socket."""
    header = _exactly(connection, _LENGTH.size)
    return None if header is None else _exactly(connection, _LENGTH.unpack(header)[0])


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(count - len(received), 2**20))
        if not piece:
            return None
        received += piece
    return bytes(received)


class FrameBuffer:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def add(self, piece: bytes) -> None:
        """Add bytes from the stream."""
        self._bytes += piece

    def take(self) -> bytes | None:
        """Return the oldest complete frame, or None.

        Raises:
            ChannelError: a frame claims to be larger than any answer.
        """
        if len(self._bytes) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._bytes)
        if length > LARGEST_ANSWER:
            raise ChannelError(f"a frame of {length} bytes")
        end = _LENGTH.size + length
        if len(self._bytes) < end:
            return None
        frame = bytes(self._bytes[_LENGTH.size : end])
        del self._bytes[:end]
        return frame
