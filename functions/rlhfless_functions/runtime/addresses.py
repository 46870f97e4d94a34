"""Addresses of this host: the one at which others reach it, and ports for servers that it starts."""

import random
import socket

_PORTS = range(20000, 30000)
"""Below all that Linux and macOS give to connections, and below Kubernetes' node ports."""


def address_of(host: str) -> str:
    """Return the address of a server that listens on this host, for others: the host itself, or this host's own address
    if the server listens on all of them.

    Raises:
        OSError: if this host has no address.
    """
    return own_address() if host == "0.0.0.0" else host


def own_address() -> str:
    """Return the address at which others reach this host: the source address of its default route.

    Raises:
        OSError: if it has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("192.0.2.1", 9))  # Nothing is sent.
            address: str = asked.getsockname()[0]
        except OSError:
            address = socket.gethostbyname(socket.gethostname())
    return address


def free_port() -> int:
    """Return a port of the loopback address at which nothing listens, for a server that another process starts.

    A port that the system chooses is of those that it gives to connections, and one of them may take it before the
    server does. So it is one of another range.

    Raises:
        OSError: if none is free.
    """
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError("no port is free for a server on 127.0.0.1")
