"""The threads of a job: no more than its own wait for its store, and they leave its folder by no link."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from rlhfless_functions import artifacts
from rlhfless_operator.controller.tenancy import threads
from rlhfless_operator.controller.tenancy.threads import (
    THREADS_OF_A_JOB,
    Crew,
    JobThreads,
    LinkedFolderError,
    check_links,
    in_time,
)
from rlhfless_operator.errors import StoreUnavailableError
from rlhfless_operator.records.folder import JobFolder
from rlhfless_operator.training.journal.step_journal import read_status
from tests.prerequisites import needs_landlock


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def result(crew: Crew, call: Callable[[], object]) -> object:
    return crew.submit(call).result(timeout=60)


def test_a_store_that_never_answers_holds_the_threads_of_its_own_job(tmp_path: Path, released: threading.Event) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(JobThreads(1))
        hung = [Crew(str(tmp_path / f"hung-{number}"), str(tmp_path)) for number in range(33)]
        waiting: list[asyncio.Task[bool]] = []
        for crew in hung:
            with crew.at_work():
                waiting += [asyncio.create_task(asyncio.to_thread(released.wait)) for _ in range(8)]
        with Crew(str(tmp_path / "mine"), str(tmp_path)).at_work():
            assert await asyncio.to_thread(lambda: "answered") == "answered"
        assert await asyncio.to_thread(lambda: "answered") == "answered", "nor the threads of no job"
        assert not any(task.done() for task in waiting)
        names = [thread.name for thread in threading.enumerate() if "hung-" in thread.name]
        assert len(names) <= 33 * THREADS_OF_A_JOB
        released.set()
        assert all(await asyncio.gather(*waiting)), "what waited for a thread is done later"

    asyncio.run(main())


def test_a_look_at_a_store_that_does_not_answer_ends(
    monkeypatch: pytest.MonkeyPatch, released: threading.Event
) -> None:
    monkeypatch.setattr(threads, "ANSWER_SECONDS", 0.05)

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(JobThreads(1))
        crew = Crew("s3://bucket/team/job", "s3://bucket")
        with crew.at_work():
            for _ in range(2 * THREADS_OF_A_JOB):
                with pytest.raises(StoreUnavailableError, match="has not answered"):
                    await in_time(released.wait)
            assert crew._threads == THREADS_OF_A_JOB, "each try adds one, up to those of a job"
            released.set()
            monkeypatch.setattr(threads, "ANSWER_SECONDS", 60.0)
            assert await in_time(lambda: 1) == 1, "once it answers again"

    asyncio.run(main())


def test_errors_and_cancelled_calls_leave_the_threads_usable(tmp_path: Path, released: threading.Event) -> None:
    crew = Crew(str(tmp_path / "job"), str(tmp_path))
    with pytest.raises(ZeroDivisionError):
        result(crew, lambda: 1 / 0)
    held = [crew.submit(released.wait) for _ in range(THREADS_OF_A_JOB)]
    never: Future[object] = crew.submit(lambda: pytest.fail("it was cancelled"))
    assert never.cancel()
    released.set()
    assert all(future.result(timeout=60) for future in held)
    assert result(crew, lambda: 2) == 2


@needs_landlock("no thread is confined")
def test_links_made_while_a_driver_runs_lead_nowhere(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "theirs" / "runs" / "job", tmp_path / "mine" / "runs" / "job"
    theirs.mkdir(parents=True)
    (theirs / "status.json").write_text('{"step": 7, "message": "theirs"}')
    crew, folder = Crew(str(mine), str(tmp_path)), JobFolder(str(mine))
    result(crew, lambda: artifacts.write_json(folder.file("status.json"), {"step": 1}))
    status = result(crew, lambda: read_status(folder))
    assert status is not None
    (mine / "status.json").unlink()
    (mine / "status.json").symlink_to(theirs / "status.json")
    (mine / "results").symlink_to(theirs.parent)
    for call in (
        lambda: read_status(folder),
        lambda: artifacts.write_json(f"{mine}/results/new.json", {}),
        lambda: artifacts.remove(f"{mine}/results/job"),
        lambda: artifacts.read_bytes("/proc/self/environ"),
        lambda: artifacts.read_bytes(str(theirs / "status.json")),
    ):
        with pytest.raises(artifacts.ArtifactError):
            result(crew, call)
    assert sorted(path.name for path in theirs.iterdir()) == ["status.json"]
    assert not (theirs.parent / "new.json").exists()


@needs_landlock("no thread is confined")
def test_the_models_of_a_namespace_and_the_jobs_files_can_be_read_and_not_written(tmp_path: Path) -> None:
    team, files = tmp_path / "team", tmp_path / "files"
    for folder in (team / "models", files):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    crew = Crew(str(team / "runs" / "job"), str(tmp_path), [str(team), str(files)])
    for folder in (team / "models", files):
        assert result(crew, lambda folder=folder: artifacts.read_json(f"{folder}/config.json")) == {}
        with pytest.raises(artifacts.ArtifactError):
            result(crew, lambda folder=folder: artifacts.write_json(f"{folder}/config.json", 1))


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "theirs")
    crew = Crew(str(tmp_path / "mine" / "runs" / "job"), str(tmp_path))
    for _ in range(2):
        with pytest.raises(LinkedFolderError, match=r"mine is a link or a file; remove it"):
            result(crew, lambda: 1)
    assert not list((tmp_path / "theirs").iterdir())
    (tmp_path / "mine").unlink()
    assert result(crew, lambda: 1) == 1


def test_a_folder_with_a_link_in_it_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    check_links(str(tmp_path))
    check_links(str(tmp_path / "missing"))
    (tmp_path / "results" / "latest").symlink_to("../results")
    check_links(str(tmp_path))
    (tmp_path / "results" / "batch.json").symlink_to("/etc/passwd")
    with pytest.raises(LinkedFolderError, match=r"results/batch\.json is a link that leads out"):
        check_links(str(tmp_path))


@needs_landlock("no thread is confined")
def test_a_confined_thread_still_does_what_a_driver_does(tmp_path: Path) -> None:
    root = tmp_path / "team" / "job"

    def work() -> None:
        for number in range(3):
            artifacts.write_json(f"{root}/a/{number}.json", number)
        assert artifacts.create_exclusive(f"{root}/leases/1.json", b"{}")
        with artifacts.publish(f"{root}/weights/1") as folder:
            (folder / "x").write_bytes(b"x")
        artifacts.remove(f"{root}/a")
        artifacts.sweep(str(root), [f"{root}/weights"])

    result(Crew(str(root), str(tmp_path)), work)
    assert [path.name for path in root.iterdir()] == ["weights"]
