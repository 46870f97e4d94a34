"""The local platform: real processes that come when they are wanted and go when they are not."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import Done, Event, ExportRequest, Failed, Preload, Started, WeightsReference
from rlhfless_functions.settings import ModelSettings
from rlhfless_operator.platforms.base import InstanceLostError, StateChange, TaskFailedError
from rlhfless_operator.platforms.local import platform as local
from rlhfless_operator.platforms.local.fork_server import ForkServer
from rlhfless_operator.platforms.local.platform import LocalPlatform
from rlhfless_operator.platforms.stream import run_task
from tests.jobs import export_request
from tests.processes import children_with, named

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")


@asynccontextmanager
async def platform(folder: Path, keep_alive: float) -> AsyncIterator[tuple[LocalPlatform, list[StateChange]]]:
    changes: list[StateChange] = []
    made = LocalPlatform(
        keep_alive={"learning": keep_alive}, threads={}, log_path=folder / "log.jsonl", on_state=changes.append
    )
    try:
        yield made, changes
    finally:
        await made.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def states_of(changes: list[StateChange], instance: str) -> list[str]:
    return [change.state for change in changes if change.instance == instance]


def in_state(changes: list[StateChange], state: str) -> set[str]:
    newest = {change.instance: change.state for change in changes}
    return {instance for instance, current in newest.items() if current == state}


def an_export(source: str, part: str = "export", result: str = "") -> ExportRequest:
    outcome = {"result": result or f"{source}-result.json", "destination": f"{source}-exported"}
    return export_request(part, source=source, **outcome)


async def test_instances_come_and_go_with_what_is_wanted(tmp_path: Path, tiny_model: Path) -> None:
    preload = Preload(
        model=ModelSettings(source=str(tiny_model)), weights=WeightsReference(version=0, uri=str(tiny_model))
    )
    async with platform(tmp_path, keep_alive=0.0) as (made, changes):
        await made.hold("learning", 2, preload)
        await until(lambda: len(in_state(changes, "idle")) == 2)
        await made.hold("learning", 1, preload)
        await until(lambda: len(in_state(changes, "ended")) == 1)
        assert len(in_state(changes, "idle")) == 1
        ended = in_state(changes, "ended").pop()
        assert states_of(changes, ended) == ["starting", "idle", "draining", "ended"]
        assert named("learning-1") or named("learning-2")
    assert in_state(changes, "ended") == {"learning-1", "learning-2"}


async def test_an_idle_instance_is_kept_for_as_long_as_was_asked(tmp_path: Path) -> None:
    async with platform(tmp_path, keep_alive=0.3) as (made, changes):
        await made.hold("learning", 1)
        await until(lambda: bool(in_state(changes, "idle")))
        for _ in range(5):
            await made.hold("learning", 0)
        await until(lambda: bool(in_state(changes, "ended")))
        idle_since = next(change.at for change in changes if change.state == "idle")
        draining = next(change.at for change in changes if change.state == "draining")
        assert draining >= idle_since + 0.3


async def test_the_first_request_names_the_fault_that_kept_an_instance_from_starting(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    preload = Preload(model=ModelSettings(source=missing), weights=WeightsReference(version=0, uri=missing))
    async with platform(tmp_path, keep_alive=0.0) as (made, _):
        await made.hold("learning", 1, preload)
        with pytest.raises(TaskFailedError, match="missing"):
            async for _ in made.run(an_export(missing)):
                pass


@pytest.mark.usefixtures("cold_start")
async def test_a_template_that_cannot_start_is_an_error_and_no_endless_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with platform(tmp_path, keep_alive=0.0) as (made, _):
        with pytest.raises(InstanceLostError, match="learning instances end before they are ready; see "):
            async for _ in made.run(an_export("m")):
                pass
    assert "no torch here" in (tmp_path / "log.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("cold_start")
async def test_a_killed_fork_server_is_replaced(tmp_path: Path, tiny_model: Path) -> None:
    async with platform(tmp_path, keep_alive=60.0) as (made, changes):
        await made.hold("learning", 1)
        await until(lambda: bool(in_state(changes, "idle")))
        (fork_server,) = children_with("rlhfless_functions.serving.fork_server")
        fork_server.kill()
        await until(lambda: in_state(changes, "ended") == {"learning-1"})
        request = an_export(str(tiny_model)).model_copy(
            update={"destination": str(tmp_path / "out"), "result": str(tmp_path / "result.json")}
        )
        events = [event.event async for event in made.run(request)]
    assert events[-1] == "done"
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("cold_start")
async def test_what_the_fork_server_imports_is_no_start_up_of_an_instance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job would keep instances as if each start took as long."""
    imported = asyncio.Event()
    ready = ForkServer.ready

    async def slowly(server: ForkServer) -> None:
        await imported.wait()
        await ready(server)

    monkeypatch.setattr(ForkServer, "ready", slowly)
    async with platform(tmp_path, keep_alive=0.0) as (made, changes):
        await made.hold("learning", 2)
        await asyncio.sleep(0.1)
        assert changes == []
        await made.hold("learning", 1)
        imported.set()
        await until(lambda: bool(in_state(changes, "idle")))
        assert len(in_state(changes, "idle")) == 1


async def test_an_instance_that_is_busy_with_what_was_cut_is_asked_again(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take a request that was cut on its way just after it has said that it is free."""
    refusals = 10

    async def refused_at_first(*arguments: Any, **options: Any) -> AsyncIterator[Event]:
        nonlocal refusals
        if refusals:
            refusals -= 1
            raise TaskFailedError(Failed(reason="busy", message="the instance is at work", retryable=True))
        async with aclosing(run_task(*arguments, **options)) as events:
            async for event in events:
                yield event

    monkeypatch.setattr(local, "run_task", refused_at_first)
    preload = Preload(
        model=ModelSettings(source=str(tiny_model)), weights=WeightsReference(version=0, uri=str(tiny_model))
    )
    async with platform(tmp_path, keep_alive=0.0) as (made, changes):
        await made.hold("learning", 1, preload)
        events = [event async for event in made.run(an_export(str(tiny_model)))]
        assert isinstance(events[-1], Done)
        assert refusals == 0
        assert {change.instance for change in changes} == {"learning-1"}


async def test_the_next_attempt_at_a_part_goes_to_the_instance_that_had_the_last_one(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Several may be cut at the same time, and each instance has kept something of its own part."""
    preload = Preload(
        model=ModelSettings(source=str(tiny_model)), weights=WeightsReference(version=0, uri=str(tiny_model))
    )
    async with platform(tmp_path, keep_alive=0.0) as (made, changes):
        await made.hold("learning", 3, preload)
        await until(lambda: len(in_state(changes, "idle")) == 3)

        async def attempt(part: str, result: str) -> str:
            request = an_export(str(tiny_model), part, str(tmp_path / f"{part}-{result}.json"))
            async with aclosing(made.run(request)) as events:
                (started,) = [event.instance async for event in events if isinstance(event, Started)]
                return started

        first = [await attempt(part, "first") for part in "abc"]
        assert len(set(first)) == 3
        assert [await attempt(part, "second") for part in "cba"] == first[::-1], "not the one that is idle for longest"
