"""Ports for servers that another process starts."""

import socket

import pytest

from rlhfless_functions.runtime import addresses
from rlhfless_functions.runtime.addresses import free_port


def test_nothing_listens_at_a_free_port_and_no_connection_takes_it() -> None:
    port = free_port()
    assert 1024 < port < 30000, "connections have the ports from 32768 on, node ports those from 30000 on"
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_a_port_that_a_server_has_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    with socket.create_server(("127.0.0.1", first)):
        second = free_port()
        monkeypatch.setattr(addresses, "_PORTS", [first, second])
        assert {free_port() for _ in range(20)} == {second}
        monkeypatch.setattr(addresses, "_PORTS", [first])
        with pytest.raises(OSError, match="no port is free"):
            free_port()
