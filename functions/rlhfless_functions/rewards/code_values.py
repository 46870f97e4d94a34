"""What the code under test and its judge tell each other. Stands alone: both import it in isolated interpreters.

Plain values travel as copies. Everything else of the code's own stays with it, and the judge has a `Remote` in its
place. The judge trusts nothing it is sent: it makes objects of a few known types alone, and no other global is looked
up.
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
"""Bytes of the longest message that is taken."""

PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray, tuple, list, dict, set, frozenset)
_NUMPY = ("numpy._core.multiarray", "numpy.core.multiarray")
KNOWN = {
    *(("builtins", kind.__name__) for kind in (*PLAIN[1:], range, slice)),
    *(("collections", name) for name in ("OrderedDict", "deque", "defaultdict", "Counter")),
    *(("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")),
    *((module, name) for module in _NUMPY for name in ("_reconstruct", "scalar")),
    *(("decimal", "Decimal"), ("fractions", "Fraction"), ("numpy", "ndarray"), ("numpy", "dtype")),
}
"""What may be in a message besides plain values."""
_WRITTEN_IN_PYTHON = {("collections", "Counter"), ("fractions", "Fraction")}
"""A message can set attributes of what it names, and these classes' would change what comparing them means."""


class ValueRefusedError(Exception):
    """A message holds what no message may hold."""


def send(connection: socket.socket, payload: bytes) -> None:
    """Send one message."""
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> bytes:
    """Wait for one message.

    Raises:
        EOFError: the other side has ended.
        ValueRefusedError: it claims to be longer than any is.
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
    """Whether a value is sent as a copy; what it holds is asked for itself."""
    kind = type(value)
    if kind in PLAIN or (kind.__module__, kind.__qualname__) in KNOWN:
        return True
    if isinstance(value, type | types.BuiltinFunctionType):
        return (value.__module__, value.__qualname__) in KNOWN
    # Its numbers and types of numbers; each of them is made of its dtype and its bytes.
    return kind.__module__ in ("numpy", "numpy.dtypes")


def dumps(value: Any, name_of: Callable[[Any], Any]) -> bytes:
    """Pickle a value; `name_of` says how what does not travel is named, or None for what is pickled as it is."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return name_of(obj)

    buffer = io.BytesIO()
    Pickler(buffer, protocol=4).dump(value)
    return buffer.getvalue()


def loads(payload: bytes, find: Callable[[Any], Any], *, trusted: bool) -> Any:
    """The value of a message; `find` gives what a name stands for. Unless trusted it may hold what is `KNOWN` alone.

    Raises:
        ValueRefusedError: it holds anything else.
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
