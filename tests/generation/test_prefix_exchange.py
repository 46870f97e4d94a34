"""Files of shared prefixes that instances send each other through an object store."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts.errors import ArtifactMissingError
from rlhfless_functions.generation import prefix_exchange
from rlhfless_functions.generation.prefix_exchange import PrefixExchange

CONTENT = bytes(range(256)) * 1000


@pytest.fixture
def opened() -> Iterator[Callable[[str], PrefixExchange]]:
    """Exchanges of instances, closed at the end."""
    made: list[PrefixExchange] = []

    def open_exchange(uri: str) -> PrefixExchange:
        made.append(PrefixExchange(uri))
        return made[-1]

    yield open_exchange
    for each in made:
        each.close()
        assert not each.folder.exists()


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def write(exchange: PrefixExchange, name: str, content: bytes = CONTENT) -> None:
    """As the engine does: whole or not at all."""
    own = exchange.folder / f".own-{name}"
    own.write_bytes(content)
    own.replace(exchange.folder / name)


@pytest.mark.parametrize("wanted_first", [True, False])
def test_a_file_that_one_instance_sends_appears_where_it_is_wanted(
    remote_store: str, opened: Callable[[str], PrefixExchange], wanted_first: bool
) -> None:
    source, reader, other = opened(remote_store), opened(remote_store), opened(remote_store)
    if wanted_first:
        reader.want("a.safetensors")
        other.want("b.safetensors")
    source.send("a.safetensors")
    write(source, "a.safetensors")
    if not wanted_first:
        until(lambda: len(artifacts.list_files(remote_store)) == 1)
        reader.want("a.safetensors")
        other.want("b.safetensors")
    reader.want("a.safetensors")
    until((reader.folder / "a.safetensors").exists)
    assert (reader.folder / "a.safetensors").read_bytes() == CONTENT
    assert list(other.folder.iterdir()) == [], "what is not wanted is not fetched"
    # Seconds are counted once a file is where it goes.
    until(lambda: source.seconds()["seconds_sent"] > 0 and reader.seconds()["seconds_fetched"] > 0)
    assert source.seconds()["seconds_fetched"] == 0 == reader.seconds()["seconds_sent"]


def test_what_is_damaged_is_not_taken_and_another_actors_is(
    remote_store: str, opened: Callable[[str], PrefixExchange]
) -> None:
    source, reader = opened(remote_store), opened(remote_store)
    artifacts.write_bytes(f"{remote_store}/a.safetensors.{'0' * 32}", CONTENT[:-1])
    reader.want("a.safetensors")
    until(lambda: reader._refused.total() == prefix_exchange._MOST_REFUSALS)
    assert not (reader.folder / "a.safetensors").exists()
    write(source, "a.safetensors")
    source.send("a.safetensors")
    until((reader.folder / "a.safetensors").exists)
    assert (reader.folder / "a.safetensors").read_bytes() == CONTENT


def test_an_object_that_is_seen_before_all_of_it_is_there_is_taken_later(
    remote_store: str, opened: Callable[[str], PrefixExchange], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # However slow this machine is.
    monkeypatch.setattr(prefix_exchange, "_MOST_REFUSALS", 1000)
    (tmp_path / "whole").write_bytes(CONTENT)
    uri = f"{remote_store}/a.safetensors.{prefix_exchange._checksum(tmp_path / 'whole')}"
    reader = opened(remote_store)
    artifacts.write_bytes(uri, CONTENT[:-1])
    reader.want("a.safetensors")
    until(lambda: reader._refused[uri] > 0)
    assert not (reader.folder / "a.safetensors").exists()
    artifacts.write_bytes(uri, CONTENT)
    until((reader.folder / "a.safetensors").exists)
    assert (reader.folder / "a.safetensors").read_bytes() == CONTENT


def test_a_run_that_ends_sends_what_it_has_written_and_waits_for_nothing(remote_store: str) -> None:
    source = PrefixExchange(remote_store)
    write(source, "a.safetensors")
    source.send("a.safetensors")
    source.send("never written.safetensors")
    source.want("never sent.safetensors")
    source.close()
    (sent,) = artifacts.list_files(remote_store)
    assert "/a.safetensors." in sent


def test_a_store_that_fails_for_a_while_is_asked_again(
    opened: Callable[[str], PrefixExchange], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = f"memory://{tmp_path.name}"
    source, reader = opened(uri), opened(uri)
    write(source, "a.safetensors")
    source.send("a.safetensors")
    until(lambda: len(artifacts.list_files(uri)) == 1)
    list_files, remote, failures = prefix_exchange.list_files, prefix_exchange.remote, ["look", "fetch"]

    def look(uri: str) -> list[str]:
        if "look" in failures:
            failures.remove("look")
            raise ArtifactMissingError("out of order")
        return list_files(uri)

    def fetch(uri: str) -> object:
        if "fetch" in failures:
            failures.remove("fetch")
            raise OSError("out of order")
        return remote(uri)

    monkeypatch.setattr(prefix_exchange, "list_files", look)
    monkeypatch.setattr(prefix_exchange, "remote", fetch)
    reader.want("a.safetensors")
    until((reader.folder / "a.safetensors").exists)
    assert failures == []
