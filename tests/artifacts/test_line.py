"""The line in which new instances find those that fetch the same weights, or have them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfless_functions import artifacts
from rlhfless_functions.artifacts import line as lines
from rlhfless_functions.artifacts.line import MOST_ASKED, OLDEST_SECONDS, Line, entry_name, sources

OWN = "http://10.0.0.9:8080"


def name(seconds: float, host: str, *, number: int = 0) -> str:
    return f"{int(seconds * 1000):013d}-{number:012x}-{host}-8080"


def address(host: str) -> str:
    return f"http://{host}:8080"


def test_an_instance_fetches_from_the_nearest_before_it() -> None:
    names = [name(second, f"10.0.0.{second}") for second in (5, 1, 3, 2, 7, 4)]
    assert sources(name(6, "10.0.0.6"), names) == [address(f"10.0.0.{number}") for number in (5, 4, 3)]
    assert sources(name(1, "10.0.0.1"), names) == []


def test_entries_of_the_same_millisecond_have_an_order() -> None:
    one, two = name(1, "10.0.0.1", number=1), name(1, "10.0.0.2", number=2)
    assert sources(one, [one, two]) == []
    assert sources(two, [one, two]) == [address("10.0.0.1")]


def test_an_instance_that_entered_long_ago_is_not_asked() -> None:
    names = [name(1000, "10.0.0.1"), name(1000.001, "10.0.0.2")]
    assert sources(name(1000.001 + OLDEST_SECONDS, "10.0.0.3"), names) == [address("10.0.0.2")]


def test_an_instance_that_enters_again_keeps_its_place() -> None:
    names = [name(1, "10.0.0.1"), name(2, "10.0.0.2"), name(3, "10.0.0.3"), name(4, "10.0.0.2")]
    # The third one may be waiting for the second one since its first attempt.
    assert sources(name(4, "10.0.0.2"), names) == [address("10.0.0.1")]
    assert sources(name(5, "10.0.0.5"), names) == [address(f"10.0.0.{number}") for number in (2, 3, 1)]


def test_a_new_instance_may_fetch_from_one_of_the_chain_that_entered_a_little_later() -> None:
    names = [name(second, f"10.0.0.{second}") for second in (1, 2, 3, 4)]
    chain = [address("10.0.0.4"), address("10.0.0.3"), address("10.0.0.8")]
    assert sources(name(1, "10.0.0.1"), names, chain) == [address("10.0.0.3"), address("10.0.0.4")]
    assert sources(name(2, "10.0.0.2"), names, chain) == [address(f"10.0.0.{number}") for number in (1, 3, 4)]


@pytest.mark.parametrize(
    "garbage",
    [
        "", "manifest.json", "garbage", name(1, "10.0.0.999"), name(1, "example.org"), name(1, "10.0.0.1")[1:],
        "0000000001000-000000000000-10.0.0.1-0", "0000000001000-000000000000-10.0.0.1-99999",
        "0000000001000-000000000000-10.0.0.1@evil-80", "000000000100\u0660-000000000000-10.0.0.1-80",
    ],
)  # fmt: skip
def test_what_is_no_entry_is_skipped(garbage: str) -> None:
    assert sources(name(3, "10.0.0.3"), [garbage, name(2, "10.0.0.2")]) == [address("10.0.0.2")]


@given(
    st.lists(
        st.tuples(st.integers(0, 10), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**20 - 1)),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.integers(1, 6), max_size=3, unique=True),
)
def test_no_instances_wait_for_each_other_whatever_they_see(
    entries: list[tuple[int, int, int, int]], in_chain: list[int]
) -> None:
    chain = [address(f"10.0.0.{each}") for each in in_chain]
    waits_for: dict[str, set[str]] = {}
    written: list[tuple[str, str]] = []
    # In the order of writing. Clocks differ and go back, and some of what others write is seen too late.
    for seconds, number, last, mask in entries:
        host = f"10.0.0.{last}"
        own = name(seconds, host, number=number)
        seen = {each: at for place, (each, at) in enumerate(written) if at == host or mask >> place & 1}
        if address(host) in chain:
            found = chain[: chain.index(address(host))]
        else:
            found = sources(own, seen, chain)
            assert len(found) == len(set(found)) <= MOST_ASKED
            before = {address(at) for each, at in seen.items() if each < own}
            assert set(found) <= (before | set(chain)) - {address(host)}
        written.append((own, host))
        # It waits for none of an earlier attempt any more.
        waits_for[address(host)] = set(found)
    left = set(waits_for)
    while left:
        free = {each for each in left if not waits_for[each] & left}
        assert free, f"{left} wait for each other"
        left -= free


def test_an_entry_names_the_time_and_the_address() -> None:
    made = entry_name(1_700_000_000.5, OWN)
    assert made is not None
    assert made.startswith("1700000000500-")
    assert made.endswith("-10.0.0.9-8080")
    assert made != entry_name(1_700_000_000.5, OWN)


@pytest.mark.parametrize("unreachable", [None, "", "http://[::1]:80", "http://name:80", "http://10.0.0.1", "garbage"])
def test_an_address_that_no_entry_can_hold_does_not_enter(unreachable: str | None, tmp_path: Path) -> None:
    assert Line(str(tmp_path), unreachable).enter() == []
    assert list(tmp_path.iterdir()) == []


def test_the_line_is_in_an_object_store(s3: str) -> None:
    folder = f"{s3}/lines/step-000001"
    assert Line(folder, address("10.0.0.1")).enter() == []
    assert Line(folder, address("10.0.0.2"), [address("10.0.0.2")]).enter() == []
    assert Line(folder, address("10.0.0.3")).enter() == [address("10.0.0.2"), address("10.0.0.1")]
    assert len(artifacts.list_files(folder)) == 3


def test_an_instance_looks_for_those_that_were_still_writing(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = f"{s3}/lines/step-000001"

    def late(seconds: float) -> None:
        assert seconds > 0
        artifacts.write_bytes(f"{folder}/{name(1, '10.0.0.1')}", b"")
        artifacts.write_bytes(f"{folder}/{entry_name(lines.time.time() - 1, address('10.0.0.2'))}", b"")

    monkeypatch.setattr(lines, "SETTLING_SECONDS", 60.0)
    monkeypatch.setattr(lines.time, "sleep", late)
    assert Line(folder, OWN).enter() == [address("10.0.0.2")]


def test_a_store_that_cannot_be_written_or_read_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert Line(str(tmp_path / "file" / "line"), OWN).enter() == []
    assert "the store is read" in caplog.text
    caplog.clear()

    def refuses(uri: str) -> list[str]:
        raise artifacts.ArtifactMissingError(f"{uri} may not be read")

    monkeypatch.setattr(lines, "list_files", refuses)
    assert Line(str(tmp_path / "line"), OWN).enter() == []
    assert "may not be read" in caplog.text
