"""Folders that are published as changes of others: readers that have the other one fetch only what changed."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_functions.api import WeightsFetched
from rlhfless_functions.artifacts.copies import find_copy
from rlhfless_functions.artifacts.manifest import Delta
from tests.artifacts.folders import content

FIRST = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 4096}
SECOND = {**FIRST, "model.safetensors": bytes([*range(255), 1]) + FIRST["model.safetensors"][256:]}
THIRD = {**SECOND, "model.safetensors": SECOND["model.safetensors"][:-1] + b"\1"}


class Machine:
    """A machine with copies of its own."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache = cache
        self._monkeypatch = monkeypatch

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with self._monkeypatch.context() as patched:
            patched.setenv("RLHFLESS_CACHE", str(self.cache))
            yield

    def publish(self, uri: str, files: dict[str, bytes], since: str | None = None) -> None:
        with self.at_work(), artifacts.publish(uri, since=since) as folder:
            for name, data in files.items():
                (folder / name).write_bytes(data)

    def read(self, uri: str) -> tuple[dict[str, bytes], WeightsFetched]:
        """A folder's files, and what was fetched for them."""
        before = artifacts.fetched()
        with self.at_work():
            found = content(uri)
        now = artifacts.fetched()
        return found, WeightsFetched(
            bytes=now.bytes - before.bytes,
            deltas=now.deltas - before.deltas,
            refused_deltas=now.refused_deltas - before.refused_deltas,
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Machine]:
    return lambda name: Machine(tmp_path / name, monkeypatch)


@pytest.fixture
def versions(remote_store: str, machine: Callable[[str], Machine]) -> tuple[str, str]:
    """Two versions, the second published as a change of the first."""
    first, second = artifacts.join(remote_store, "1"), artifacts.join(remote_store, "2")
    learner = machine("learner")
    learner.publish(first, FIRST, since=artifacts.join(remote_store, "0"))
    learner.publish(second, SECOND, since=first)
    return first, second


def deltas_of(uri: str) -> dict[str, int]:
    """Bytes of a folder's deltas."""
    found = artifacts.manifest(uri)
    assert found is not None
    return {name: entry.size for name, entry in found.delta.files.items()} if found.delta is not None else {}


def delta_uri(uri: str) -> str:
    found = artifacts.manifest(uri)
    assert found is not None and found.delta is not None
    return artifacts.join(uri, found.delta.files["model.safetensors"].stored or "")


def test_a_reader_with_the_version_before_fetches_what_changed(
    versions: tuple[str, str], machine: Callable[[str], Machine]
) -> None:
    first, second = versions
    actor = machine("actor")
    assert actor.read(first) == (FIRST, WeightsFetched(bytes=sum(map(len, FIRST.values()))))
    found, fetched = actor.read(second)
    assert found == SECOND
    assert fetched == WeightsFetched(bytes=sum(deltas_of(second).values()), deltas=1)
    assert fetched.bytes < len(FIRST["model.safetensors"]) / 100
    assert actor.read(first)[0] == FIRST, "it is as it was"


def test_a_reader_without_it_fetches_everything(versions: tuple[str, str], machine: Callable[[str], Machine]) -> None:
    everything = WeightsFetched(bytes=sum(map(len, SECOND.values())))
    assert machine("actor").read(versions[1]) == (SECOND, everything)


def test_a_publisher_has_a_copy_of_what_it_published(
    versions: tuple[str, str], machine: Callable[[str], Machine]
) -> None:
    learner = machine("learner")
    assert learner.read(versions[0]) == (FIRST, WeightsFetched())
    assert learner.read(versions[1]) == (SECOND, WeightsFetched())


def test_versions_follow_each_other(
    versions: tuple[str, str], remote_store: str, machine: Callable[[str], Machine]
) -> None:
    third, actor = artifacts.join(remote_store, "3"), machine("actor")
    machine("learner").publish(third, THIRD, since=versions[1])
    for uri, files, deltas in ((versions[0], FIRST, 0), (versions[1], SECOND, 1), (third, THIRD, 1)):
        found, fetched = actor.read(uri)
        assert (found, fetched.deltas) == (files, deltas)
    late = machine("late")
    late.read(versions[0])
    assert late.read(third) == (THIRD, WeightsFetched(bytes=sum(map(len, THIRD.values()))))


def test_a_publisher_without_the_version_before_publishes_everything(
    versions: tuple[str, str], remote_store: str, machine: Callable[[str], Machine]
) -> None:
    third = artifacts.join(remote_store, "3")
    machine("another learner").publish(third, THIRD, since=versions[1])
    assert deltas_of(third) == {}
    assert machine("actor").read(third)[0] == THIRD


def test_what_would_be_hardly_smaller_is_not_there(remote_store: str, machine: Callable[[str], Machine]) -> None:
    import numpy as np

    random, learner = np.random.default_rng(0), machine("learner")
    first, second = artifacts.join(remote_store, "1"), artifacts.join(remote_store, "2")
    learner.publish(first, {"model": random.bytes(10_000), "settings": b"x" * 10_000}, since="memory://none")
    learner.publish(second, {"model": random.bytes(10_000), "settings": b"x" * 9_999 + b"y"}, since=first)
    assert deltas_of(second).keys() == {"settings"}


def test_a_folder_of_this_machine_needs_no_deltas(tmp_path: Path, machine: Callable[[str], Machine]) -> None:
    machine("learner").publish(str(tmp_path / "1"), FIRST)
    machine("learner").publish(str(tmp_path / "2"), SECOND, since=str(tmp_path / "1"))
    assert {path.name for path in (tmp_path / "2").iterdir()} == {*SECOND, "manifest.json"}
    assert not (tmp_path / "learner").exists()


# --- several publishers of one folder ----------------------------------------------------------------------------

PARTS = ({"part-1": FIRST["model.safetensors"]}, {"part-2": FIRST["model.safetensors"][::-1], "index": b"{}"})
LATER_PARTS = ({"part-1": SECOND["model.safetensors"]}, {"part-2": THIRD["model.safetensors"][::-1], "index": b"{}"})


def publish_parts(
    uri: str, parts: tuple[dict[str, bytes], ...], machines: list[Machine], since: str, *, complete: bool = True
) -> None:
    """Have each machine upload a part; they are published together unless that is broken off before."""
    with ExitStack() as opened:
        uploads = []
        for number, (files, machine) in enumerate(zip(parts, machines, strict=True)):
            with machine.at_work():
                uploads.append(opened.enter_context(artifacts.uploading(uri, since=since, part=str(number))))
            for name, data in files.items():
                (uploads[-1].folder / name).write_bytes(data)
        sent = []
        for upload, machine in zip(uploads, machines, strict=True):
            with machine.at_work():
                sent.append(upload.send())
        if not complete:
            return
        published = artifacts.combine(sent)
        assert artifacts.complete(uri, published)
        for upload, machine in zip(uploads, machines, strict=True):
            with machine.at_work():
                upload.keep(published)


@pytest.mark.parametrize("together", [False, True], ids=["machines of their own", "one machine"])
def test_each_of_several_publishers_says_what_changed_in_its_part(
    together: bool, remote_store: str, machine: Callable[[str], Machine]
) -> None:
    first, second = artifacts.join(remote_store, "1"), artifacts.join(remote_store, "2")
    learners = [machine("one"), machine("one" if together else "two")]
    actor = machine("actor")
    publish_parts(first, PARTS, learners, since="memory://none")
    assert deltas_of(first) == {}
    assert actor.read(first)[0] == PARTS[0] | PARTS[1]
    publish_parts(second, LATER_PARTS, learners, since=first)
    assert deltas_of(second).keys() == {"part-1", "part-2"}
    found, fetched = actor.read(second)
    assert found == LATER_PARTS[0] | LATER_PARTS[1]
    assert fetched == WeightsFetched(bytes=sum(deltas_of(second).values()), deltas=2)
    # A publisher's part is never taken for the folder.
    assert learners[0].read(second)[0] == LATER_PARTS[0] | LATER_PARTS[1]


def test_a_publisher_that_is_new_leaves_its_part_without_changes(
    remote_store: str, machine: Callable[[str], Machine]
) -> None:
    first, second, actor = artifacts.join(remote_store, "1"), artifacts.join(remote_store, "2"), machine("actor")
    publish_parts(first, PARTS, [machine("one"), machine("two")], since="memory://none")
    actor.read(first)
    publish_parts(second, LATER_PARTS, [machine("one"), machine("new")], since=first)
    assert deltas_of(second).keys() == {"part-1"}
    found, fetched = actor.read(second)
    assert found == LATER_PARTS[0] | LATER_PARTS[1]
    assert (fetched.deltas, fetched.refused_deltas) == (1, 0)


def test_parts_that_were_broken_off_are_never_mixed_with_those_of_the_next_publishers(
    remote_store: str, machine: Callable[[str], Machine]
) -> None:
    first, second, actor = artifacts.join(remote_store, "1"), artifacts.join(remote_store, "2"), machine("actor")
    learners = [machine("one"), machine("two")]
    publish_parts(first, PARTS, learners, since="memory://none")
    actor.read(first)
    damaged = ({"part-1": b"x" * 1000}, {"part-2": b"y" * 1000, "index": b"{}"})
    publish_parts(second, damaged, learners, since=first, complete=False)
    assert not artifacts.is_published(second)
    publish_parts(second, LATER_PARTS, learners, since=first)
    found, fetched = actor.read(second)
    assert found == LATER_PARTS[0] | LATER_PARTS[1]
    assert (fetched.deltas, fetched.refused_deltas) == (2, 0)


def test_parts_made_against_different_versions_are_refused() -> None:
    parts = [artifacts.Manifest({}, Delta(base * 64, {})) for base in "ab"]
    with pytest.raises(ValueError, match="different versions"):
        artifacts.combine(parts)


# --- what can go wrong -------------------------------------------------------------------------------------------


def damage(uri: str) -> None:
    data = bytearray(artifacts.read_bytes(uri))
    data[len(data) // 2] ^= 1
    artifacts.write_bytes(uri, bytes(data))


@pytest.mark.parametrize(("harm", "words"), [(damage, "is damaged"), (artifacts.remove, "does not exist")])
def test_a_delta_that_is_of_no_use_is_named_and_the_version_is_fetched_whole(
    versions: tuple[str, str],
    machine: Callable[[str], Machine],
    harm: Callable[[str], None],
    words: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor = machine("actor")
    actor.read(versions[0])
    harm(delta_uri(versions[1]))
    with caplog.at_level(logging.WARNING):
        found, fetched = actor.read(versions[1])
    assert found == SECOND
    assert (fetched.deltas, fetched.refused_deltas) == (0, 1)
    assert delta_uri(versions[1]) in caplog.text and words in caplog.text and "fetched whole" in caplog.text


def test_a_copy_that_is_not_what_it_was_gives_no_wrong_weights(
    versions: tuple[str, str], machine: Callable[[str], Machine], caplog: pytest.LogCaptureFixture
) -> None:
    actor = machine("actor")
    actor.read(versions[0])
    with actor.at_work():
        copy = find_copy(versions[0])
    assert copy is not None
    damage(str(copy / "model.safetensors"))
    found, fetched = actor.read(versions[1])
    assert found == SECOND
    assert (fetched.deltas, fetched.refused_deltas) == (0, 1)
    assert "does not make the file that was published" in caplog.text


def test_a_reader_that_is_broken_off_has_the_old_version_or_none(
    versions: tuple[str, str], machine: Callable[[str], Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rlhfless_functions.artifacts import retrieval

    actor = machine("actor")
    actor.read(versions[0])
    copies = set(actor.cache.iterdir())

    def cut(base: Path, delta: Path, new: Path) -> None:
        new.write_bytes(SECOND["model.safetensors"][:1000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(retrieval, "apply_delta", cut)
        with pytest.raises(KeyboardInterrupt):
            actor.read(versions[1])
    assert set(actor.cache.iterdir()) == copies
    assert actor.read(versions[0])[0] == FIRST
    assert actor.read(versions[1])[0] == SECOND


def test_where_the_version_is_damaged_and_its_delta_too_nothing_is_taken(
    versions: tuple[str, str], machine: Callable[[str], Machine]
) -> None:
    actor = machine("actor")
    actor.read(versions[0])
    damage(delta_uri(versions[1]))
    damage(artifacts.join(versions[1], "model.safetensors"))
    with pytest.raises(artifacts.ArtifactCorruptError, match=r"/2/model\.safetensors is corrupt"):
        actor.read(versions[1])
    assert actor.read(versions[0])[0] == FIRST


def test_of_two_publishers_one_has_published(
    versions: tuple[str, str], remote_store: str, machine: Callable[[str], Machine]
) -> None:
    third, learner = artifacts.join(remote_store, "3"), machine("learner")
    with learner.at_work(), artifacts.publish(third, since=versions[1]) as folder:
        (folder / "model.safetensors").write_bytes(THIRD["model.safetensors"])
        machine("another").publish(third, {"model.safetensors": b"another's"})
    assert learner.read(third)[0] == {"model.safetensors": b"another's"}
    assert [name for name in artifacts.list_files(third) if ".delta" in name] == []


def test_a_version_whose_changes_can_not_be_published_is_published(
    versions: tuple[str, str],
    remote_store: str,
    machine: Callable[[str], Machine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from rlhfless_functions.artifacts import uploads

    def full(base: Path, new: Path, delta: Path) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(uploads, "write_delta", full)
    third = artifacts.join(remote_store, "3")
    machine("learner").publish(third, THIRD, since=versions[1])
    assert deltas_of(third) == {}
    assert machine("actor").read(third)[0] == THIRD
    assert "is published without what changed" in caplog.text and "No space left" in caplog.text


def test_a_version_of_which_no_copy_can_be_kept_is_published(
    remote_store: str, tmp_path: Path, machine: Callable[[str], Machine], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "learner").write_text("a file")
    first = artifacts.join(remote_store, "1")
    machine("learner").publish(first, FIRST, since="memory://none")
    assert machine("actor").read(first)[0] == FIRST
    assert "without what changed" in caplog.text and "learner cannot be written" in caplog.text


def test_a_version_whose_copy_is_refused_is_published(
    versions: tuple[str, str],
    remote_store: str,
    machine: Callable[[str], Machine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from rlhfless_functions.artifacts import uploads

    def full(folder: Path, uri: str, published: artifacts.Manifest, part: str) -> None:
        raise artifacts.ArtifactUnwritableError("no space is left on the device")

    monkeypatch.setattr(uploads, "keep_copy", full)
    third = artifacts.join(remote_store, "3")
    machine("learner").publish(third, THIRD, since=versions[1])
    assert machine("actor").read(third)[0] == THIRD
    assert "the next version is published in full: no space is left" in caplog.text
    assert [path for path in (machine("learner").cache).iterdir() if ".tmp-" in path.name] == []
