"""Local instances that take turns on GPUs: real processes, on devices that are names only."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from rlhfless_functions.api import Done, ExportRequest, MaterializeRequest, RunRequest, Stage, TaskKey
from rlhfless_functions.settings import DataSettings, ModelSettings, SamplingSettings
from rlhfless_operator.platforms.base import StateChange
from rlhfless_operator.platforms.local.platform import LocalPlatform
from tests.jobs import export_request
from tests.processes import named

pytestmark = pytest.mark.usefixtures("warm_start", "nothing_is_left_behind")

EACH: dict[Stage, int] = {"generation": 1, "preparation": 1, "learning": 1}


class Watched:
    """A platform, and what became of its instances."""

    def __init__(self, folder: Path, gpus: tuple[str, ...], per_instance: dict[Stage, int]) -> None:
        self.changes: list[StateChange] = []
        self._log = folder / "log.jsonl"
        self.platform = LocalPlatform(
            keep_alive=dict.fromkeys(EACH, 600.0),
            threads={},
            log_path=self._log,
            on_state=self.changes.append,
            gpus=gpus,
            gpus_per_instance=per_instance,
        )

    async def do(self, request: RunRequest) -> str:
        """Carry a task to its end; the name of the instance that did it."""
        instance = ""
        async for event in self.platform.run(request):
            instance = getattr(event, "instance", "") or instance
            done = isinstance(event, Done)
        assert done
        return instance

    def states_of(self, instance: str) -> list[str]:
        return [change.state for change in self.changes if change.instance == instance]

    def newest(self) -> dict[str, str]:
        return {change.instance: change.state for change in self.changes}

    async def until(self, instance: str, state: str) -> None:
        async with asyncio.timeout(120):
            while self.newest().get(instance) != state:
                await asyncio.sleep(0.01)

    def logged(self, message: str) -> list[dict[str, object]]:
        lines = [json.loads(line) for line in self._log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["message"] == message]


@asynccontextmanager
async def watched(folder: Path, *gpus: str, per_instance: dict[Stage, int] = EACH) -> AsyncIterator[Watched]:
    made = Watched(folder, gpus, per_instance)
    try:
        yield made
    finally:
        await made.platform.close()


def preparing(folder: Path, model: Path, number: int) -> MaterializeRequest:
    """A task of preparation's."""
    (folder / "data.jsonl").write_text('{"prompt": "1+1="}\n')
    return MaterializeRequest(
        key=TaskKey(job_uid="u", step=0, stage="preparation", part=f"data-{number}", attempt=0),
        result=str(folder / f"result-{number}.json"),
        model=ModelSettings(source=str(model), dtype="float32"),
        data=DataSettings(source=str(folder / "data.jsonl")),
        sampling=SamplingSettings(max_response_tokens=8),
        sink=str(folder / f"data-{number}"),
    )


def learning(folder: Path, model: Path, number: int) -> ExportRequest:
    """A task of the learner's."""
    outcome = {"result": str(folder / f"exported-{number}.json"), "destination": str(folder / f"exported-{number}")}
    key = TaskKey(job_uid="u", step=number, stage="learning", part="export", attempt=0)
    return export_request(key=key, source=str(model), **outcome)


async def test_stages_take_turns_on_one_gpu_and_their_processes_stay(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "3") as seen:
        did = []
        for number in range(2):
            did.append(await seen.do(preparing(tmp_path, tiny_model, number)))
            did.append(await seen.do(learning(tmp_path, tiny_model, number)))
        assert did == ["preparation-1", "learning-2", "preparation-1", "learning-2"]
        assert seen.states_of("learning-2")[:5] == ["starting", "idle", "busy", "idle", "switching"]
        assert seen.states_of("learning-2")[5:] == ["asleep", "switching", "busy", "idle"]
        assert [line["instance"] for line in seen.logged("instance sleeps")] == did[:3]
        assert {(line["instance"], *line["gpus"]) for line in seen.logged("instance has GPUs of its own")} == {  # type: ignore[misc]
            ("preparation-1", "3"),
            ("learning-2", "3"),
        }
        at_work: set[str] = set()
        for change in seen.changes:
            (at_work.discard if change.state in ("asleep", "ended") else at_work.add)(change.instance)
            assert len(at_work) <= 1


async def test_with_a_gpu_for_each_nobody_sleeps(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0", "1") as seen:
        for number in range(2):
            await seen.do(preparing(tmp_path, tiny_model, number))
            await seen.do(learning(tmp_path, tiny_model, number))
        assert seen.newest() == {"preparation-1": "idle", "learning-2": "idle"}
        assert seen.logged("instance sleeps") == []
        assert sorted(str(line["gpus"]) for line in seen.logged("instance has GPUs of its own")) == ["['0']", "['1']"]


async def test_a_stage_that_needs_no_gpu_sees_none_and_displaces_nobody(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0", per_instance={"generation": 1, "learning": 1}) as seen:
        await seen.do(learning(tmp_path, tiny_model, 0))
        await seen.do(preparing(tmp_path, tiny_model, 0))
        assert seen.newest() == {"learning-1": "idle", "preparation-2": "idle"}
        assert [line["gpus"] for line in seen.logged("instance has GPUs of its own")] == [["0"], []]


async def test_tasks_that_wait_for_a_busy_gpu_get_it_one_after_the_other(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0") as seen:
        tasks = [
            preparing(tmp_path, tiny_model, 0),
            learning(tmp_path, tiny_model, 0),
            preparing(tmp_path, tiny_model, 1),
        ]
        did = await asyncio.gather(*map(seen.do, tasks))
        assert [name.split("-")[0] for name in did] == ["preparation", "learning", "preparation"]
        assert len(set(did)) == 2


async def test_instances_start_ahead_only_on_gpus_that_nobody_uses(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0") as seen:
        await seen.do(learning(tmp_path, tiny_model, 0))
        await seen.platform.hold("learning", 1)
        await seen.platform.hold("preparation", 1)
        assert seen.newest() == {"learning-1": "idle"}
        (process,) = named("learning-1")
        await seen.platform.hold("learning", 0)
        process.kill()
        await seen.until("preparation-2", "idle")


async def test_an_instance_that_cannot_sleep_is_ended(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0") as seen:
        await seen.do(learning(tmp_path, tiny_model, 0))
        (process,) = named("learning-1")
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
        seen.platform._stall_seconds = 0.5
        assert await seen.do(preparing(tmp_path, tiny_model, 0)) == "preparation-2"
        assert seen.states_of("learning-1")[-2:] == ["switching", "ended"]
        seen.platform._stall_seconds = 120.0
        assert await seen.do(learning(tmp_path, tiny_model, 1)) == "learning-3"


async def test_those_that_sleep_end_with_the_platform(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0") as seen:
        await seen.do(learning(tmp_path, tiny_model, 0))
        await seen.do(preparing(tmp_path, tiny_model, 0))
        assert named("learning-1")
        assert named("preparation-2")
    assert set(seen.newest().values()) == {"ended"}


async def test_an_instance_that_sleeps_goes_when_it_is_kept_no_longer(tmp_path: Path, tiny_model: Path) -> None:
    async with watched(tmp_path, "0") as seen:
        await seen.do(learning(tmp_path, tiny_model, 0))
        (process,) = named("learning-1")
        await seen.do(preparing(tmp_path, tiny_model, 0))
        assert process.is_running()
        seen.platform._keep_alive = {}
        await seen.platform.hold("learning", 0)
        await asyncio.to_thread(process.wait, 60)
        await seen.until("learning-1", "ended")
        assert seen.states_of("learning-1")[-3:] == ["switching", "asleep", "ended"]
