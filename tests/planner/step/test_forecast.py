"""What a division comes to, with a tail that is moved in several ways."""

import numpy as np
import pytest

from rlhfless_operator.planner.latency.linear import InstanceProfile, LinearLatency
from rlhfless_operator.planner.pools.shared_gpus import SharedGpus, Stage
from rlhfless_operator.planner.step.forecast import StepForecast, Tail, Training
from rlhfless_operator.planner.step.holding import STEPS_OF_A_START, Holding
from rlhfless_operator.planner.step.learner_scaling import LearnerOption
from rlhfless_operator.planner.step.loads import Loads, SampleLoad
from rlhfless_operator.planner.step.planning import Division

PROFILE = InstanceProfile(LinearLatency(0.010, 1e-4, 1e-7, 3e-5), 1, 10**6, 1.0, 2.0)
SAMPLES = [SampleLoad(prompt, index, 100, 100.0 + prompt) for prompt in range(80) for index in range(4)]


def forecast(share, *, batch=256, instances=8, tokens=2000.0, samples=SAMPLES):
    """A division into as many prompts each, where so many of all responses are runaways."""
    loads = Loads(samples, PROFILE.latency, kv_tokens=None, max_batch=batch)
    tail = Tail.of(loads, tokens, dict.fromkeys(range(80), share))
    division = Division(tuple(np.array_split(np.arange(len(samples)), instances)))
    return StepForecast(division, loads, PROFILE, 2.0, tail), tail


def test_a_dearer_second_spreads_the_tail_over_more_instances() -> None:
    """Few instances are cheap, and slow down with every runaway that they are given."""
    found, _ = forecast(0.1)
    ends, costs = [], []
    for price in (0.0, 2.0, 20.0):
        found.take(price)
        ends.append(found.end)
        costs.append(found.gpu_seconds)
    assert ends[0] > ends[-1]
    assert costs[0] < costs[-1]
    assert ends == sorted(ends, reverse=True)
    assert costs == sorted(costs)


def test_more_runaways_end_later_and_cost_more() -> None:
    found = [forecast(share)[0] for share in (0.01, 0.1, 0.3)]
    ends, costs = [each.end for each in found], [each.gpu_seconds for each in found]
    assert ends == sorted(ends)
    assert costs == sorted(costs)


def test_runaways_that_are_planned_as_such_are_not_expected_again() -> None:
    planned = [SampleLoad(0, index, 100, 2000.0 if index == 0 else 100.0) for index in range(4)]
    _, tail = forecast(0.25, samples=planned, instances=1)
    assert tail.expected.tolist() == [0, 0, 0, 0]
    _, tail = forecast(0.5, samples=planned, instances=1)
    assert tail.expected.sum() == pytest.approx(1.0 * 3 / 4)


def test_of_those_that_wait_for_room_the_runaways_end_one_after_another() -> None:
    found, tail = forecast(0.1, batch=16, instances=2)
    ends = found.completions[tail.delayed]
    assert ends.max() == pytest.approx(found.end)
    assert ends.min() < found.end - 1
    at_once, tail = forecast(0.1, instances=2)
    assert at_once.completions[tail.delayed].tolist() == pytest.approx([at_once.end] * int(tail.delayed.sum()))


def test_without_runaways_nothing_is_moved() -> None:
    found, _ = forecast(0.0, tokens=0.0)
    before = found.end, found.gpu_seconds
    found.take(100.0)
    assert (found.end, found.gpu_seconds) == before


def test_what_is_held_costs_its_gpus_for_the_whole_step() -> None:
    found, _ = forecast(0.0, tokens=0.0)
    work = np.full(80, 0.1)
    seconds, gpu_seconds = found.held(work, Training(8, 0.0, 2.0, 0.5), Holding(8, 3.0, 9.0))
    assert gpu_seconds == pytest.approx(8 * seconds)
    assert found.end < seconds <= found.end + work.sum() / 8 + 0.5 + 1e-9
    later, dearer = found.held(work, Training(8, 0.0, 2.0, 0.5), Holding(5, 3.0, 9.0))
    assert later == pytest.approx(seconds + 3.0 / STEPS_OF_A_START)
    assert dearer == pytest.approx(8 * later + 3 * 9.0 / STEPS_OF_A_START)


def test_preparation_begins_with_a_whole_chunk_and_may_have_to_wake() -> None:
    """A plan had one instance prepare where two were needed: it was thought to begin with the first group, awake."""
    found, _ = forecast(0.0, tokens=0.0, instances=4)
    work, done = np.full(80, 0.1), np.sort(found.completions)
    moments = {}
    for start in (0.0, 3.5):
        training = Training(4, 0.0, 0.0, 0.0, preparers=(1, 2), preparer_start_seconds=start)
        moments[start] = [found.prepared(work, training, preparers) for preparers in (1, 2)]
    assert moments[0.0][0].min() == pytest.approx(done[80 // 6 - 1] + 0.1)
    assert moments[0.0][1].min() == pytest.approx(done[80 // 12 - 1] + 0.1), "chunks are smaller, as two prepare"
    assert moments[3.5][0].min() == pytest.approx(moments[0.0][0].min() + 3.5)
    assert moments[3.5][0].max() == pytest.approx(max(done[-1] + 0.1, done[80 // 6 - 1] + 3.5 + 8.0))


def test_a_number_of_learners_costs_the_same_whether_it_was_chosen_or_given() -> None:
    """A plan left out the work of a given learner. So it weighed the cost of actors too much."""
    found, _ = forecast(0.0, tokens=0.0, instances=4)
    tokens, common = np.full(80, 400.0), {"preparers": (1,), "follows": True, "learning_price": 2.0}
    option = LearnerOption(3, 1e-4, 0.5, 4.0)
    given = Training(
        *(4, 1e-4, 0.0, 0.0),
        accumulation_token_seconds=1e-4,
        afterwards_seconds=0.5,
        learning_instances=3,
        learner_idle_seconds=4.0,
        **common,
    )
    prepared = found.prepared(1e-4 * tokens, given, 1)
    chosen = found.learnt(prepared, tokens, Training(4, 1e-4, 0.0, 0.0, learners=(option,), **common), option, 1)
    assert found.trained_apart(prepared, tokens, given, 1) == chosen


def learnt(shared, *, follows, preparers=1):
    """The moments at which all groups are prepared, and at which they are learnt from."""
    found, _ = forecast(0.0, instances=4)
    option = LearnerOption(2, 1e-3, 0.0, 0.0)
    training = Training(4, 1e-4, 0.0, 0.0, preparers=(preparers,), follows=follows, shared=shared)
    tokens = np.full(80, 400.0)
    prepared = found.prepared(1e-4 * tokens, training, preparers)
    return found, float(prepared.max()), found.learnt(prepared, tokens, training, option, preparers)[1]


@pytest.mark.parametrize("follows", [True, False])
def test_a_learner_begins_when_actors_have_left_it_gpus(follows: bool) -> None:
    stages: dict[Stage, int] = {"generation": 1, "preparation": 1, "learning": 1}
    found, prepared, apart = learnt(None, follows=follows)
    _, beside, roomy = learnt(SharedGpus(8, stages), follows=follows)
    assert (beside, roomy) == (prepared, apart)
    actors, late, few = learnt(SharedGpus(4, stages), follows=follows)
    assert actors.end == found.end
    learning = 80 * 400e-3
    assert late >= min(actors._ends)
    # Beside preparation it needs the GPUs of three of the four actors.
    assert few >= sorted(actors._ends)[2] + learning - 1e-9
    assert few >= apart


def test_one_gpu_goes_from_stage_to_stage() -> None:
    found, prepared, end = learnt(SharedGpus(1, {"generation": 1, "preparation": 1, "learning": 0}), follows=True)
    assert prepared >= min(found._ends)
    assert end >= prepared
