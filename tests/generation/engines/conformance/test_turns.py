"""Samples leave the run when a turn ends. They come back with given tokens, as with an environment."""

import random
from collections import Counter
from dataclasses import replace

from rlhfless_functions.generation.engines.base import Engine, SequenceResult, SequenceTask
from tests.generation.engines.shares import SAMPLING, Results, assert_same, generate, share

LONGEST = SAMPLING.model_copy(update={"max_response_tokens": 40})
TURNS, ANSWER = 3, 5
Key = tuple[int, int]


def answered(task: SequenceTask, result: SequenceResult) -> SequenceTask:
    """The sample with an answer, which depends on what it said alone."""
    numbers = random.Random(repr((result.prompt, result.index, result.response_tokens)))
    tokens = [*result.response_tokens, *(numbers.randrange(2, 66) for _ in range(ANSWER))]
    return replace(task, response_tokens=tokens, log_probs=[*result.log_probs, *[0.0] * ANSWER])


def is_over(turns: int, result: SequenceResult) -> bool:
    return turns == TURNS or len(result.response_tokens) + ANSWER >= LONGEST.max_response_tokens


def turn_by_turn(engine: Engine, tasks: list[SequenceTask]) -> Results:
    """Each turn is a run of its own."""
    finished: Results = {}
    for turn in range(1, TURNS + 1):
        results = generate(engine, tasks, LONGEST)
        over = {key: result for key, result in results.items() if is_over(turn, result)}
        finished |= over
        tasks = [answered(task, results[key]) for task in tasks if (key := (task.prompt, task.index)) not in over]
        if not tasks:
            break
    return finished


def in_one_run(
    engine: Engine, tasks: list[SequenceTask], delay: int, budget: int | None = None, *, expected: bool = True
) -> Results:
    """Samples come back into the run after up to so many steps, in any order."""
    numbers, finished, turns = random.Random(delay), Results(), Counter[Key]()
    by_key = {(task.prompt, task.index): task for task in tasks}
    away: list[tuple[int, SequenceTask]] = []
    run, step = engine.start(tasks, LONGEST, budget), 0
    if expected:
        run.expect_returns()
    while run.running or run.waiting or away:
        step += 1
        for task in [task for at, task in away if at <= step]:
            run.add(task, returns=True)
        away = [(at, task) for at, task in away if at > step]
        for result in run.step():
            key = (result.prompt, result.index)
            turns[key] += 1
            if is_over(turns[key], result):
                finished[key] = result
            else:
                away.append((step + numbers.randint(1, delay), answered(by_key[key], result)))
    return finished


def test_a_turn_is_the_same_in_the_run_of_the_turn_before_and_in_one_of_its_own(engine: Engine) -> None:
    tasks = share(8, 3)
    wanted = turn_by_turn(engine, tasks)
    assert len(wanted) == len(tasks)
    for delay, budget in ((1, None), (6, 200), (60, None)):
        assert_same(in_one_run(engine, tasks, delay, budget), wanted)
    assert_same(in_one_run(engine, tasks, 6, expected=False), wanted)


def test_a_run_whose_samples_are_all_away_has_nothing_to_do(engine: Engine) -> None:
    (task,) = share(1, 1)
    run = engine.start([task], SAMPLING, None)
    run.remove([task.key])
    assert run.step() == [] and not run.running and not run.unfinished()
    run.add(task)
    results: list[SequenceResult] = []
    while not results:
        results = run.step()
    assert_same({(0, 0): results[0]}, generate(engine, [task]))


def test_given_tokens_are_computed_once_and_never_counted_as_sampled(engine: Engine) -> None:
    (task,) = share(1, 1)
    (first,) = generate(engine, [task], LONGEST).values()
    back = answered(task, replace(first, response_tokens=first.response_tokens[:4], log_probs=first.log_probs[:4]))
    run = engine.start([back], LONGEST, None)
    results: list[SequenceResult] = []
    while not results:
        results = run.step()
    assert run.computed.response == len(results[0].response_tokens) - 4 - ANSWER
    assert results[0].log_probs[4 : 4 + ANSWER] == [0.0] * ANSWER
