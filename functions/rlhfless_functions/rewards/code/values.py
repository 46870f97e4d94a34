"""The messages between the code under test and its judge. Stands alone: both import it in isolated interpreters.

Plain values are copied. All other objects of the code stay in its process, and the judge gets a `Remote` instead. The
judge does not trust messages: it creates only objects of a few known types, and looks up no other global.
"""

import functools
import importlib
import io
import pickle
import socket
import struct
import types
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("!Q")
_LONGEST = 2**28
"""Bytes of the longest accepted message."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
KNOWN = {
    *(("builtins", kind.__name__) for kind in (*PLAIN[1:], range, slice)),
    *(("collections", name) for name in ("OrderedDict", "deque", "defaultdict", "Counter")),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *((module, name) for module in _NUMPY for name in ("_reconstruct", "scalar")),
    *(("decimal", "Decimal"), ("fractions", "Fraction"), ("numpy", "ndarray"), ("numpy", "dtype")),
}
"""Types allowed in a message besides plain values."""
_WRITTEN_IN_PYTHON = {("collections", "Counter"), ("fractions", "Fraction")}
"""A message can set attributes of objects that it names. Those of these classes would change the meaning of
comparisons."""


class ValueRefusedError(Exception):
    """A message holds something that is not allowed."""


def send(connection: socket.socket, payload: bytes) -> None:
    """Send one message."""
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes:
    """Wait for one message.

    Raises:
        EOFError: the other side has ended.
        ValueRefusedError: it claims to be longer than the limit.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _LONGEST:
        raise ValueRefusedError(f"a message of {length} bytes")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(count - len(received), 2**20))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def travels(value: Any) -> bool:
    """Return whether a value is sent as a copy. Its contents are decided separately."""
    kind = type(value)
    if kind in PLAIN or (kind.__module__, kind.__qualname__) in KNOWN:
        return True
    if isinstance(value, type | types.BuiltinFunctionType):
        return (value.__module__, value.__qualname__) in KNOWN
    # NumPy's numbers and their types; each is created from its dtype and its bytes.
    return kind.__module__ in ("numpy", "numpy.dtypes")


def dumps(value: Any, name_of: Callable[[Any], Any]) -> bytes:
    """Pickle a value. `name_of` returns the name of an object that stays, or None for one that is pickled."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return name_of(obj)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def loads(payload: bytes, find: Callable[[Any], Any], *, trusted: bool) -> Any:
    """Return the value of a message. `find` resolves names. An untrusted message may only hold `KNOWN` types.

    Raises:
        ValueRefusedError: the message holds anything else.
    """

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return find(pid)

        def find_class(self, module: str, name: str) -> Any:
            if trusted:
                return super().find_class(module, name)
            if (module, name) not in KNOWN:
                raise ValueRefusedError(f"{module}.{name}")
            found = getattr(importlib.import_module(module), name)
            return functools.partial(found) if (module, name) in _WRITTEN_IN_PYTHON else found

    return Unpickler(io.BytesIO(payload)).load()
