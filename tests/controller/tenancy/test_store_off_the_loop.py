"""The operator's event loop never waits for a store: a store that does not answer would hold all jobs up."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from rlhfless_functions.artifacts import files
from tests.clusters.emulated_functions import Emulation, Held
from tests.controller.api_server_jobs import jobs as jobs  # The fixtures.
from tests.controller.api_server_jobs import server as server
from tests.controller.operator_harness import Jobs, running_operator, wait_for
from tests.jobs import small_job

Watch = Callable[[str], AbstractContextManager[None]]


def caller() -> str:
    """File and line of the code that asks the store."""
    frame = sys._getframe()
    while frame.f_back is not None:
        name = frame.f_code.co_filename
        ours = "/tests/" in name or "/rlhfless_operator/" in name
        if ours and Path(name).resolve() != Path(__file__).resolve():
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@pytest.fixture
def on_the_loop(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Places of the operator's code that ask the store in the thread of an event loop. Emulated functions may."""
    found: Counter[str] = Counter()

    def watched(watch: Watch) -> Watch:
        @contextmanager
        def ask(uri: str) -> Iterator[None]:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                if "/rlhfless_operator/" in (place := caller()):
                    found[place] += 1
            with watch(uri):
                yield

        return ask

    for name in ("reading", "writing"):
        monkeypatch.setattr(files, name, watched(getattr(files, name)))
    return found


@pytest.mark.parametrize("asynchronous", [{}, {"async": {"maxStaleness": 1}}], ids=["steps", "asynchronous"])
def test_no_code_of_a_job_asks_the_store_on_the_loop(
    jobs: Jobs, tmp_path: Path, on_the_loop: Counter[str], asynchronous: dict[str, object]
) -> None:
    held = Held(lambda request: (request.task, request.key.step) == ("learn", 2))
    evaluation = {"data": {"source": "e.jsonl"}, "everySteps": 1}
    with running_operator(tmp_path, Emulation(holding=held)):
        jobs.apply(small_job(evaluation=evaluation, checkpoints={"everySteps": 2}, **asynchronous))
        wait_for(lambda: held.reached)
        jobs.patch("job", {"spec": {"suspend": True}})
        jobs.wait_phase("job", "Suspended")
        held.over = True
        jobs.patch("job", {"spec": {"suspend": False, "optimizer": {"learningRate": 0.5}}})
        assert jobs.wait_phase("job", "Succeeded", "Failed")["phase"] == "Succeeded"
    assert not on_the_loop, "\n".join(map(str, on_the_loop.most_common()))
