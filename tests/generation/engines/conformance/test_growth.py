"""Runs that sequences are added to, and removed from."""

from rlhfless_functions.generation.engines.base import Engine, Growth, SequenceResult
from tests.generation.engines.shares import SAMPLING, assert_same, continued, finish, generate, share

GROWTH = Growth(sequences=4, prompt_tokens=40)


def results_of(results: list[SequenceResult]) -> dict[tuple[int, int], SequenceResult]:
    return {(result.prompt, result.index): result for result in results}


def test_added_sequences_are_what_they_are_in_a_run_of_their_own(engine: Engine) -> None:
    tasks = share(4, 3)
    wanted = generate(engine, tasks)
    run = engine.start(tasks[:3], SAMPLING, None, growth=GROWTH)
    results = []
    for task in tasks[3:]:
        results += run.step()
        run.add(task)
        assert run.running <= GROWTH.sequences
    assert_same(results_of(results + finish(run)), wanted)


def test_removed_sequences_go_on_elsewhere(engine: Engine) -> None:
    tasks = share(4, 3)
    wanted = generate(engine, tasks)
    run = engine.start(tasks, SAMPLING, None, growth=GROWTH)
    results = [result for _ in range(5) for result in run.step()]
    done = {result.key for result in results}
    gone = [task for task in tasks if task.key not in done][1::2]
    partials = [each for each in run.unfinished() if each.key in {task.key for task in gone}]
    assert partials
    run.remove([task.key for task in gone])
    results += finish(run)
    assert results_of(results).keys() == {(task.prompt, task.index) for task in tasks if task not in gone}
    assert_same(results_of(results) | generate(engine, continued(gone, partials)), wanted)


def test_one_prompt_is_in_a_run_for_two_steps(engine: Engine) -> None:
    first = share(2, 2)
    second = share(2, 2, seed=1)
    later = [type(task)(**{**vars(task), "step": 2}) for task in second]
    run = engine.start(first, SAMPLING, None, growth=GROWTH)
    results = run.step()
    for task in later:
        run.add(task)
    results += finish(run)
    assert_same(results_of([each for each in results if each.step == 1]), generate(engine, first))
    assert_same(results_of([each for each in results if each.step == 2]), generate(engine, second))
