"""A model that drafts for itself draws what the engine draws, bit for bit, in as many passes as were counted."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhfless_functions.generation.early_exit.draft_speed import Choice, count_cycles
from rlhfless_functions.generation.early_exit.layers import ExitLayers, find_layers
from rlhfless_functions.generation.early_exit.readouts import DrawnResponse, read_out
from rlhfless_functions.generation.early_exit.self_drafting import Exit, SelfDrafting
from rlhfless_functions.generation.engines.base import SequenceTask
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.settings import EngineSampling
from rlhfless_functions.weights import load_policy
from tests.generation.early_exit.models import deep, idle_behind, model_of
from tests.generation.engines.shares import Results, finish, settings_of, share, version
from tests.model.families import FAMILIES, save

torch.set_num_threads(1)

LONGEST = 24


def drawn(folder: Path, tasks: list[SequenceTask], temperature: float) -> Results:
    engine = TransformersEngine()
    engine.load(settings_of(folder), version(folder))
    sampling = EngineSampling(temperature=temperature, max_prompt_tokens=64, max_response_tokens=LONGEST)
    return {(result.prompt, result.index): result for result in finish(engine.start(tasks, sampling, None))}


def exits_of(folder: Path) -> ExitLayers:
    return find_layers(load_policy(settings_of(folder), version(folder)), str(folder))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.nightly), 0.8])
def test_drafts_change_no_bit_in_any_family(family: str, temperature: float, tiny_model: Path, tmp_path: Path) -> None:
    folder = save(FAMILIES[family], tmp_path / "model", tiny_model)
    tasks = share(4, 1)
    results = drawn(folder, tasks, temperature)
    exits = exits_of(folder)
    responses = [
        DrawnResponse(task.prompt_tokens, results[task.prompt, 0].response_tokens, task.seed) for task in tasks
    ]
    read = read_out(exits, responses, temperature)
    drafting = SelfDrafting(exits, temperature, LONGEST)
    ways: list[tuple[Choice, int]] = [("drawn", 3), ("likeliest", 15)]
    for choice, drafts in ways:
        passes = 0
        for task in tasks:
            expected = results[task.prompt, 0]
            decoded = drafting.decode(task, len(expected.response_tokens), Exit(1, drafts, choice))
            assert decoded.tokens == expected.response_tokens
            assert decoded.log_probs == expected.log_probs
            passes += decoded.passes
        right = read.drawn[0] if choice == "drawn" else read.likeliest[0]
        assert passes == count_cycles(right, read.lengths, drafts, LONGEST).count


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return save(deep(), tmp_path_factory.mktemp("deep"), tiny_model)


@pytest.fixture(scope="module")
def drafting(folder: Path) -> SelfDrafting:
    return SelfDrafting(exits_of(folder), 1.0, LONGEST)


@pytest.mark.slow
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_exit_length_and_choice_gives_the_same_bits(
    folder: Path, drafting: SelfDrafting, data: st.DataObject
) -> None:
    (task,) = [share(8, 1)[data.draw(st.integers(0, 7))]]
    (expected,) = drawn(folder, [task], 1.0).values()
    length = data.draw(st.integers(1, len(expected.response_tokens)))
    choice: Choice = data.draw(st.sampled_from(["drawn", "likeliest"]))
    exit_ = Exit(data.draw(st.integers(1, 4)), data.draw(st.integers(1, 15)), choice)
    decoded = drafting.decode(task, length, data.draw(st.sampled_from([exit_, None])))
    assert decoded.tokens == expected.response_tokens[:length]
    assert decoded.log_probs == expected.log_probs[:length]


def test_where_later_layers_add_nothing_every_draft_is_kept() -> None:
    model = idle_behind(model_of(deep()), 1)
    drafting = SelfDrafting(find_layers(model, "idle"), 1.0, 64)
    (task,) = share(1, 1)
    plain = drafting.decode(task, 64)
    drafted = drafting.decode(task, 64, Exit(1, 7, "drawn"))
    assert drafted.tokens == plain.tokens
    assert (plain.passes, drafted.passes) == (64, 8)


def test_no_draft_goes_beyond_the_longest_response() -> None:
    model = idle_behind(model_of(deep()), 1)
    drafting = SelfDrafting(find_layers(model, "idle"), 1.0, 10)
    (task,) = share(1, 1)
    assert drafting.decode(task, 10, Exit(1, 7, "drawn")).tokens == drafting.decode(task, 10).tokens
    assert drafting.decode(task, 10, Exit(1, 7, "drawn")).passes == 2


def test_parts_of_a_cycle_are_timed(drafting: SelfDrafting) -> None:
    times = drafting.times(40)
    assert set(times.drafts) == {1, 2, 3}
    assert 1 in times.passes
    assert all(seconds > 0 for seconds in (*times.drafts.values(), *times.passes.values()))
