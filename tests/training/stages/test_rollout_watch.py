"""When a rollout's instances of each stage are asked for, by a forecast that the actors' reports correct."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfless_functions.api import GroupResult, Purpose
from rlhfless_operator.planner.acting import Acting, ActingPredictor
from rlhfless_operator.planner.history import History
from rlhfless_operator.planner.latency.linear import LinearLatency
from rlhfless_operator.planner.lengths import LengthEstimate
from rlhfless_operator.planner.moves.migration import Migration
from rlhfless_operator.planner.step.chunks import CHUNKS_PER_STEP
from rlhfless_operator.training.actors.generated import GenerationOutcome
from rlhfless_operator.training.actors.prepared import PreparationOutcome
from rlhfless_operator.training.instances.away import acting_by_token
from rlhfless_operator.training.stages import rollout_watch
from rlhfless_operator.training.stages.rollout_watch import RolloutWatch, expect_learner, seconds_to_next_look

LATENCY = LinearLatency(step_seconds=0.1, sequence_seconds=0.0, context_seconds=0.0, prefill_token_seconds=0.0)
GROUPS, LONGEST = 12, 1000
START = 2.0
SWITCH = 3.0


class Asked:
    """What capacity and preparers were asked for, in turn."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.actors = 1
        self.works = False

    async def expect(self, stage: str, count: int, preload: object, *, within: float) -> None:
        self.calls.append(("expect", stage, count, round(within, 3)))

    async def next_use(self, stage: str, within: float) -> None:
        self.calls.append(("next use", stage, round(within, 3)))

    async def has_left(self, actors: int) -> None:
        self.calls.append(("prepares", actors))

    def startup_seconds(self, stage: str) -> float:
        return START

    def switch_seconds(self, stage: str) -> float:
        return SWITCH

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


class Rollout:
    """Twelve groups of one sample on one actor, each of 100 tokens by the forecast, and a watch.

    Args:
        away: seconds that samples of prompts have been with their environments.
    """

    def __init__(
        self,
        known: dict[str, float],
        purpose: Purpose = "training",
        *,
        lets_go: bool = False,
        follows: bool = False,
        away: dict[int, float] | None = None,
        may_go_on: bool = False,
    ) -> None:
        self.remaining = dict.fromkeys(range(GROUPS), 100.0)
        self.migration = Migration(None, lambda key, tokens: (self.remaining[key[0]], 0.0))
        self.generated, self.prepared, self.asked = GenerationOutcome(sinks=[]), PreparationOutcome(), Asked()
        self.forecasts: list[float] = []
        history = History()
        for name, value in known.items():
            history.add(name, value)
        run = SimpleNamespace(
            capacity=self.asked,
            cost_model=SimpleNamespace(
                history=history, latency=LATENCY, acting=ActingPredictor(lambda: acting_by_token(history))
            ),
            learners=SimpleNamespace(now=1),
            learner_preload=None,
            requests=SimpleNamespace(learns_in_pieces=follows),
            prompts=SimpleNamespace(tokens=lambda purpose: [0] * (GROUPS + 1)),
            spec=SimpleNamespace(
                sampling=SimpleNamespace(max_response_tokens=LONGEST),
                environment=None if away is None and "environment/token" not in known else object(),
            ),
        )
        planned = SimpleNamespace(expected_generation_seconds=33.0)
        self.estimates = estimates = {prompt: LengthEstimate(100.0, 0.0, 1) for prompt in self.remaining}
        self.acting = run.cost_model.acting
        self.acting.observe({(prompt, 0): Acting(seconds, 0.0) for prompt, seconds in (away or {}).items()})
        plan = SimpleNamespace(planned=planned, estimates=estimates)

        def on_forecast(left: float) -> bool:
            self.forecasts.append(round(left, 3))
            return lets_go

        asked: Any = self.asked
        self.watch = RolloutWatch(
            *(run, purpose, plan, self.migration, self.generated, self.prepared, asked, on_forecast),  # type: ignore
            may_go_on=lambda: may_go_on,
        )

    def begins(self) -> None:
        self.migration.assigned("actor", {(prompt, 0): 0 for prompt in range(GROUPS)})

    def reports(self, tokens: int, remaining: float) -> None:
        """Every unfinished sample has so many tokens, and so many are expected."""
        for prompt in self.remaining:
            self.remaining[prompt] = remaining
        self.migration.progressed("actor", {(prompt, 0): tokens for prompt in self.remaining})

    def finishes(self, *prompts: int, tokens: int = 100) -> None:
        for prompt in prompts:
            self.generated.lengths[prompt, 0] = tokens
        self.migration.finished("actor", [(prompt, 0) for prompt in prompts])

    def is_prepared(self, *prompts: int) -> None:
        for prompt in prompts:
            self.prepared.groups[prompt] = GroupResult(prompt=prompt, reward=None, spread=1.0)

    async def look(self) -> None:
        """Look once."""
        watching = asyncio.create_task(self.watch._watch())
        for _ in range(5):
            await asyncio.sleep(0)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


async def test_the_learner_is_expected_at_the_end_of_the_rollout_and_later_if_the_actors_fall_behind() -> None:
    rollout = Rollout({})
    await rollout.look()
    rollout.begins()
    await rollout.look()
    rollout.reports(50, 50.0)
    await rollout.look()
    rollout.reports(60, 200.0)
    await rollout.look()
    assert [call[-1] for call in rollout.asked.of("expect")] == [33.0, 10.0, 5.0, 20.0], "at first, the plan's"
    assert rollout.forecasts == [33.0, 10.0, 5.0, 20.0]


async def test_time_with_environments_counts_for_each_token_that_is_still_sampled() -> None:
    rollout = Rollout({"environment/token": 0.5})
    rollout.begins()
    await rollout.look()
    rollout.reports(80, 20.0)
    await rollout.look()
    assert rollout.forecasts == [10.0 + 50.0, 2.0 + 10.0]
    assert rollout.asked.of("prepares") == [], "the first group is complete in 12 s"


async def test_a_prompt_whose_samples_were_away_for_long_is_expected_late() -> None:
    rollout = Rollout({}, away={3: 40.0, 4: 4.0})
    rollout.begins()
    await rollout.look()
    rollout.reports(50, 50.0)
    await rollout.look()
    assert rollout.forecasts == [10.0 + 40.0, 5.0 + 20.0], "half of its tokens, and of its time away, are left"
    rollout.finishes(3)
    await rollout.look()
    assert rollout.forecasts[-1] == 5.0 + 2.0


async def test_the_first_rollout_shows_how_long_environments_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of them. Other stages would be started as if samples were nearly finished."""
    now = [100.0]
    rollout = Rollout({}, away={})
    monkeypatch.setattr(rollout_watch.time, "monotonic", lambda: now[0])
    rollout.begins()
    watching = asyncio.create_task(rollout.watch._watch())
    await asyncio.sleep(0)
    watching.cancel()
    now[0] += 20.0
    rollout.reports(10, 90.0)
    assert rollout.watch._generation_seconds() == pytest.approx(9.0 + 90 * 2.0), "10 tokens in 20 s"
    rollout.finishes(3)
    rollout.generated.acting[3, 0] = Acting(50.0, 0.0)
    assert rollout.watch._generation_seconds() == pytest.approx(9.0 + 90 * 0.5), "a finished one was away for 50 s"


async def test_preparation_that_takes_longer_than_generation_decides_on_the_end() -> None:
    rollout = Rollout({"preparation/token": 0.02})
    rollout.begins()
    await rollout.look()
    assert rollout.asked.of("expect")[-1][-1] == GROUPS * 100 * 0.02
    rollout.finishes(*range(6))
    rollout.is_prepared(*range(6))
    rollout.reports(90, 10.0)
    await rollout.look()
    assert rollout.asked.of("expect")[-1][-1] == 6 * 100 * 0.02


async def test_a_chunk_that_is_being_prepared_is_nearer_to_its_end_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise what starts beside it would be put off until it is done."""
    now = [100.0]
    rollout = Rollout({"preparation/token": 0.02})
    rollout.begins()
    rollout.finishes(*range(GROUPS))
    monkeypatch.setattr(rollout_watch.time, "monotonic", lambda: now[0])
    await rollout.look()
    rollout.asked.works = True
    for passed, left in ((5.0, 19.0), (20.0, 4.0), (60.0, 0.0)):
        now[0] = 100.0 + passed
        await rollout.look()
        assert rollout.asked.of("expect")[-1][-1] == pytest.approx(left)
    rollout.is_prepared(*range(6))
    await rollout.look()
    assert rollout.asked.of("expect")[-1][-1] == pytest.approx(12.0), "the next chunk has just begun"


async def test_in_the_first_step_the_rate_of_preparation_is_that_of_its_first_groups() -> None:
    rollout = Rollout({})
    rollout.begins()
    rollout.finishes(*range(6))
    rollout.reports(90, 10.0)
    await rollout.look()
    assert rollout.asked.of("expect")[-1][-1] == 1.0, "nothing is known"
    rollout.is_prepared(*range(3))
    rollout.prepared.seconds = 3 * 100 * 0.02
    await rollout.look()
    assert rollout.asked.of("expect")[-1][-1] == 9 * 100 * 0.02


async def test_actors_and_preparation_have_their_next_work_after_learning() -> None:
    rollout = Rollout({"learning": 40.0})
    rollout.begins()
    await rollout.look()
    assert rollout.asked.of("next use") == [("generation", 50.0), ("preparation", 50.0)]
    replacing = Rollout({"learning": 40.0}, may_go_on=True)
    replacing.begins()
    await replacing.look()
    assert replacing.asked.of("next use") == [("generation", 10.0), ("preparation", 50.0)], "groups may be replaced"
    unknown = Rollout({})
    unknown.begins()
    await unknown.look()
    assert unknown.asked.of("next use") == [("generation", 10.0), ("preparation", 10.0)], "not before"


async def test_preparation_begins_when_it_can_work_without_a_pause_to_the_end() -> None:
    rollout = Rollout({"preparation/token": 0.005})
    rollout.begins()
    await rollout.look()
    assert rollout.asked.of("prepares") == [], "6 s of work, and 10 s of generation are left"
    rollout.reports(20, 79.0)
    await rollout.look()
    assert rollout.asked.of("prepares") == [], "7.9 s of generation are left, but no group is complete within a start"
    rollout.finishes(0, 1)
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,)]


async def test_preparation_begins_earlier_by_the_time_in_which_models_are_loaded() -> None:
    rollout = Rollout({"preparation/token": 0.005, "preparation/load": 3.0})
    rollout.begins()
    rollout.finishes(0, 1)
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,)], "9 s of work and loading, and 10 s of generation are left"
    assert rollout.forecasts == [11.0], "a chunk of 1 s follows"
    rollout.is_prepared(0, 1)
    assert rollout.watch._load_seconds() == 3.0
    await rollout.look()
    assert rollout.watch._load_seconds() == 0.0, "there are models now"


async def test_preparation_begins_earlier_where_a_learner_follows_it() -> None:
    for follows in (False, True):
        rollout = Rollout({"preparation/token": 0.005, "learning/token": 0.009}, follows=follows)
        rollout.begins()
        rollout.finishes(0, 1)
        rollout.reports(20, 98.0)
        await rollout.look()
        assert rollout.asked.of("prepares") == ([(1,)] if follows else []), "9.8 s of generation, 10.8 s of learning"


async def test_preparation_of_an_unknown_rate_begins_with_the_first_groups() -> None:
    rollout = Rollout({})
    rollout.begins()
    await rollout.look()
    assert rollout.asked.of("prepares") == []
    rollout.reports(80, 19.0)
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,)], "a start before they are complete"


async def test_preparation_is_let_go_while_nothing_comes_for_longer_than_a_start() -> None:
    rollout = Rollout({"preparation/token": 0.005})
    rollout.begins()
    rollout.finishes(0, 1)
    rollout.reports(90, 10.0)
    await rollout.look()
    rollout.is_prepared(0, 1)
    rollout.reports(91, 400.0)
    rollout.asked.works = True
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,)], "it works"
    rollout.asked.works = False
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,), (0,)]
    assert ("preparation", 40.0) in rollout.asked.of("next use")
    rollout.reports(480, 19.0)
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,), (0,), (1,)]


async def test_all_that_is_generated_is_prepared_at_once() -> None:
    rollout = Rollout({"preparation/token": 1e-6})
    rollout.begins()
    rollout.finishes(*range(GROUPS))
    await rollout.watch.all_is_generated()
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,)]


async def test_a_learner_that_is_being_let_go_is_not_expected_yet() -> None:
    rollout = Rollout({}, lets_go=True)
    rollout.begins()
    await rollout.look()
    assert rollout.asked.of("expect") == []


async def test_after_an_evaluation_the_learners_work_comes_a_rollout_later() -> None:
    rollout = Rollout({"rollout": 60.0}, "evaluation")
    rollout.begins()
    await rollout.look()
    assert rollout.forecasts == [70.0]
    assert rollout.asked.of("expect") == []


async def test_a_watch_that_fails_ends_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = Rollout({})

    def fails(*_: object) -> float:
        raise RuntimeError("no forecast")

    monkeypatch.setattr(rollout_watch, "seconds_left", fails)
    rollout.begins()
    with pytest.raises(RuntimeError, match="no forecast"):
        async with rollout.watch.under_way():
            await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("sleeps", "in_pieces", "asynchronous", "wanted", "within"),
    [
        (True, False, None, False, [0.0]),
        (False, True, None, False, [12.0 / CHUNKS_PER_STEP]),
        (False, False, {}, False, [12.0]),
        (False, False, {}, True, []),
    ],
)
async def test_a_learner_of_which_no_forecast_decides_is_there_when_it_has_work(
    *, sleeps: bool, in_pieces: bool, asynchronous: object, wanted: bool, within: list[float]
) -> None:
    asked = Asked()
    capacity = SimpleNamespace(sleeps=sleeps, holds=lambda stage: wanted, expect=asked.expect)
    run: Any = SimpleNamespace(
        capacity=capacity,
        spec=SimpleNamespace(asynchronous=asynchronous),
        requests=SimpleNamespace(learns_in_pieces=in_pieces),
        learners=SimpleNamespace(now=1),
        learner_preload=None,
    )
    await expect_learner(run, 12.0)
    assert asked.of("expect") == [("learning", 1, each) for each in within]


def test_looks_are_frequent_at_both_ends_of_a_rollout_and_rare_in_between() -> None:
    looks, now, whole = 0, 0.0, 600.0
    while now < whole:
        pause = seconds_to_next_look(now, whole - now)
        assert pause == pytest.approx(max(0.25, 0.05 * min(now, whole - now)))
        looks, now = looks + 1, now + pause
    assert looks < 250, "at four a second there would be 2,400"


async def test_preparation_begins_by_the_plan_where_the_forecast_of_the_rollout_is_longer() -> None:
    """It began 17 s into a step of 40 s whose rest was taken for 34 s, and the step waited for it at its end."""
    rollout = Rollout({"preparation/token": 0.0065})
    rollout.begins()
    rollout.reports(10, remaining=500.0)
    rollout.finishes(0, 1)
    # Of 50 s that seem left it would need the last 33. By the plan 33 s are left.
    assert rollout.watch._generation_seconds() == pytest.approx(50.0)
    assert 33.0 < rollout.watch._preparation_seconds() < 50.0 - START
    await rollout.look()
    assert rollout.asked.of("prepares") == [(1,)]
