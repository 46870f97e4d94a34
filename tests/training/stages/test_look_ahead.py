"""The instances that stay while a step is learnt, until the job's last step."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import STAGES, Preload, Stage
from rlhfless_operator.planner.history import History
from rlhfless_operator.training.instances.capacity import Capacity
from rlhfless_operator.training.stages.look_ahead import look_ahead

STEPS = 4
LEARNING_SECONDS = 5.0


class Platform:
    """Takes note of nothing: `Capacity` knows the number of wanted instances."""

    async def hold(self, stage: Stage, count: int, preload: Preload | None = None) -> None:
        pass


async def held_capacity() -> Capacity:
    """Instances of a step that all stay, while its learner works. They start in 10 s, and their gaps were long."""
    history = History()
    history.add("startup/generation", 10.0)
    history.add("gap/generation", 1000.0)
    capacity = Capacity(Platform(), dict.fromkeys(STAGES), history, clock=lambda: 100.0)  # type: ignore[arg-type]
    await capacity.use("generation", 2)
    await capacity.use("learning", 1)
    await capacity.stay({"generation": 2, "preparation": 1, "learning": 1})
    await capacity.use("generation", 0)
    return capacity


async def looked_ahead(step: int, *, evaluates: bool) -> Capacity:
    """The capacity of a job of four steps once the learner of a step has ended."""
    capacity = await held_capacity()
    evaluation = SimpleNamespace(every_steps=2, samples_per_prompt=1) if evaluates else None
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(evaluation=evaluation),
        capacity=capacity,
        prompts=SimpleNamespace(total_steps=STEPS, tokens=lambda purpose: [7]),
        plans=SimpleNamespace(plan=lambda prompts, samples, purpose: SimpleNamespace(shares=[[], []])),
        requests=SimpleNamespace(preload=lambda weights: None, initial=None, learns_in_pieces=True),
        cost_model=SimpleNamespace(learning_seconds=lambda tokens: LEARNING_SECONDS),
    )
    await look_ahead(run, SimpleNamespace(), step, {0: [3]}, learnt_seconds=0.0)  # type: ignore[arg-type]
    await capacity.use("learning", 0, undecided=True)
    await capacity.close()
    return capacity


@pytest.mark.parametrize("evaluates", [True, False], ids=["evaluated", "not evaluated"])
async def test_the_last_learner_may_be_let_go(evaluates: bool) -> None:
    capacity = await looked_ahead(STEPS, evaluates=evaluates)
    assert not capacity.stays
    assert capacity.has_idle("learning"), "the watch of the last evaluation may let it go"


async def test_the_last_evaluation_finds_the_instances_of_the_step_before() -> None:
    assert (await looked_ahead(STEPS, evaluates=True)).there("generation") == 2
    assert (await looked_ahead(STEPS, evaluates=False)).there("generation") == 0


async def test_an_evaluation_between_steps_ends_no_holding() -> None:
    capacity = await looked_ahead(2, evaluates=True)
    assert capacity.stays
    assert not capacity.has_idle("learning")


@pytest.mark.parametrize(("learnt", "within"), [(0.0, 21.0), (12.0, 9.0), (30.0, 1.0)])
async def test_actors_are_there_when_a_learner_that_is_behind_is_done(learnt: float, within: float) -> None:
    """They were warmed for the end of the batch, and idled for as long as the learner still had groups."""
    expected: list[float] = []

    async def expect(stage: Stage, count: int, preload: Preload | None, *, within: float) -> None:
        expected.append(within)

    run: Any = SimpleNamespace(
        spec=SimpleNamespace(evaluation=SimpleNamespace(every_steps=2, samples_per_prompt=1)),
        capacity=SimpleNamespace(expect=expect),
        prompts=SimpleNamespace(total_steps=STEPS, tokens=lambda purpose: [7]),
        plans=SimpleNamespace(plan=lambda prompts, samples, purpose: SimpleNamespace(shares=[[], []])),
        requests=SimpleNamespace(preload=lambda weights: None, initial=None),
        cost_model=SimpleNamespace(learning_seconds=lambda tokens: 2.0 * tokens + 1.0),
    )
    await look_ahead(run, SimpleNamespace(), 2, {0: [3]}, learnt)  # type: ignore[arg-type]
    assert expected == [within]
