"""The address at which other hosts reach this one."""

import socket


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
