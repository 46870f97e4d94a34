"""An instance of any stage that hangs in any manner: that is noticed, another one takes its work, the weights stay."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhfless_functions.api import STAGES, Event, RunRequest
from rlhfless_operator.platforms.base import InstanceSilentError
from rlhfless_operator.platforms.local.platform import LocalPlatform
from tests.training.standing_instances import MANNERS, all_standing, standing_instances
from tests.training.whole_jobs import assert_same_final_weights, run_job

pytestmark = [pytest.mark.usefixtures("warm_start", "nothing_is_left_behind"), pytest.mark.slow]

SHORT: dict[str, Any] = {
    "steps": len(MANNERS),
    "batch": {"promptsPerStep": 2, "samplesPerPrompt": 2, "minibatchSamples": 4},
    "sampling": {"maxPromptTokens": 16, "maxResponseTokens": 8},
    "limits": {"stall": "5s", "retries": 100},
}


@contextmanager
def noticed_stalls() -> Iterator[set[tuple[str, int]]]:
    """Yields the stage and step of each task whose instance was found to be silent."""
    noticed: set[tuple[str, int]] = set()
    run = LocalPlatform.run

    async def watched(platform: LocalPlatform, request: RunRequest) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(run(platform, request)) as events:
                async for event in events:
                    yield event
        except InstanceSilentError:
            noticed.add((request.key.stage, request.key.step))
            raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPlatform, "run", watched)
        yield noticed


def test_an_instance_that_hangs_is_replaced_and_changes_nothing(tiny_job: Callable[..., Path], tmp_path: Path) -> None:
    undisturbed = tiny_job("undisturbed", **SHORT)
    run_job(undisturbed)
    file, marks = tiny_job("hung", **SHORT), tmp_path / "marks"
    marks.mkdir()
    with standing_instances(marks) as stood, noticed_stalls() as noticed:
        run_job(file)
    assert stood == all_standing()
    assert noticed >= {(stage, step) for stage in STAGES for step in range(1, len(MANNERS) + 1)}
    assert_same_final_weights(file, undisturbed)
