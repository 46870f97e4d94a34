"""A share may be split, cut after any token and continued anywhere: its samples are the same."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlhfless_functions.generation.engines.base import Engine
from rlhfless_functions.settings import SamplingSettings
from tests.generation.engines.shares import (
    SAMPLING,
    NewEngine,
    Results,
    assert_same,
    continued,
    generate,
    save_model,
    settings_of,
    share,
    version,
)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_split_order_and_room_gives_the_same_samples(engine: Engine, data: st.DataObject) -> None:
    tasks = share(8, 3)
    whole = generate(engine, tasks)
    order = data.draw(st.permutations(tasks))
    actors = data.draw(st.integers(1, 4))
    budget = data.draw(st.sampled_from([None, 200, 1000]))
    parts: Results = {}
    for actor in range(actors):
        if mine := order[actor::actors]:
            parts |= generate(engine, mine, budget=budget)
    assert_same(parts, whole)


def test_cut_after_every_token_and_continued_elsewhere_gives_the_same_samples(
    engine: Engine, elsewhere: Engine
) -> None:
    tasks = share(8, 1)
    sampling = SAMPLING.model_copy(update={"max_response_tokens": 18})
    whole = generate(engine, tasks, sampling)
    for cut in range(1, sampling.max_response_tokens):
        run = engine.start(tasks, sampling, None)
        finished = [result for _ in range(cut) for result in run.step()]
        partials = run.unfinished()
        for partial in partials:
            assert partial.finish_reason == "cut"
            assert partial.response_tokens == whole[partial.prompt, partial.index].response_tokens[:cut]
            assert len(partial.log_probs) == cut
        done = {(result.prompt, result.index): result for result in finished}
        rest = [task for task in tasks if (task.prompt, task.index) not in done]
        assert len(partials) == len(rest)
        if rest:
            done |= generate(elsewhere, continued(rest, partials)[::-1], sampling)
        assert_same(done, whole)


def test_a_storm_of_cuts_leaves_nothing_behind(engine: Engine) -> None:
    """Runs are abandoned at every stage, some before their first token, some many times over."""
    tasks = share(8, 2)
    whole = generate(engine, tasks)
    pending = tasks
    for _ in range(3):
        for steps in (0, 1, 0, 2):
            run = engine.start(pending, SAMPLING, None)
            for _ in range(steps):
                run.step()
    run = engine.start(pending, SAMPLING, None)
    done = {(result.prompt, result.index): result for _ in range(4) for result in run.step()}
    rest = continued([task for task in tasks if (task.prompt, task.index) not in done], run.unfinished())
    assert_same(done | generate(engine, rest), whole)


def test_a_long_response_continues_where_it_was_cut(new_engine: NewEngine, tmp_path: Path, tiny_model: Path) -> None:
    folder = save_model(tmp_path, tiny_model, max_position_embeddings=512, tie_word_embeddings=False)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][1] = 0  # With the others' logits far above and below 0, EOS is never sampled.
    save_file(weights, file, metadata={"format": "pt"})
    engine = new_engine()
    engine.load(settings_of(folder), version(folder))
    sampling = SamplingSettings(max_prompt_tokens=64, max_response_tokens=330, temperature=0.1)
    tasks = share(8, 1)[7:]
    whole = generate(engine, tasks, sampling)[7, 0]
    assert whole.finish_reason == "truncated"
    run = engine.start(tasks, sampling, None)
    for _ in range(300):
        run.step()
    assert_same(generate(engine, continued(tasks, run.unfinished()), sampling), {(7, 0): whole})


def test_continued_sequences_that_still_wait_are_not_lost_by_another_cut(engine: Engine) -> None:
    tasks = share(8, 1)
    run = engine.start(tasks, SAMPLING, None)
    run.step()
    partials = run.unfinished()
    again = engine.start(continued(tasks, partials), SAMPLING, 64)
    again.step()
    kept = {(partial.prompt, partial.index): len(partial.response_tokens) for partial in again.unfinished()}
    assert kept.keys() >= {(partial.prompt, partial.index) for partial in partials[1:]}
