"""Samples that were cut, killed or moved go on elsewhere, and come to what they would have been."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlhfless_functions import artifacts
from rlhfless_functions.api import Event, GenerationRequest, GenerationResult, Partial, Samples, WeightsReference
from rlhfless_functions.data.rollouts import GeneratedSample, read_rollouts
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskContext
from tests.generation.shares import Ticks, run, run_and_kill
from tests.generation.shares import generator as generator  # The fixtures.
from tests.generation.shares import make_request as make_request
from tests.generation.shares import prompts as prompts
from tests.generation.shares import undisturbed as undisturbed
from tests.generation.shares import whole as whole


@pytest.mark.parametrize("cut", [1, 2, 5, 17, 39, 40, 41])
def test_a_cut_publishes_everything_and_the_rest_is_continued_exactly(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], GeneratedSample],
    cut: int,
) -> None:
    first = run(make_request("first"), stop_at=cut)
    kept = read_rollouts(first.result.parts)
    tokens_kept = sum(len(rollout.response_tokens) for rollout in kept.values())
    assert tokens_kept == first.result.response_tokens
    assert first.result.finished + first.result.unfinished == len(whole)
    assert {key for key, _ in first.announced(Partial)} == {k for k, rollout in kept.items() if not rollout.finished}
    for key, rollout in kept.items():
        assert rollout.response_tokens == whole[key].response_tokens[: len(rollout.response_tokens)]
    second_request = make_request("second")
    second = run(second_request.model_copy(update={"resume_from": [make_request("first").sink]}), generator)
    assert second.finished() == whole
    assert second.result.response_tokens == sum(len(r.response_tokens) for r in whole.values()) - tokens_kept


def test_samples_can_move_many_times(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    sinks: list[str] = []
    for attempt in range(4):
        request = make_request(f"attempt-{attempt}", resume_from=list(sinks))
        run(request, stop_at=16)
        sinks.append(request.sink)
    last = run(make_request("last", resume_from=sinks[::-1]), generator)
    assert last.finished() == whole
    assert last.result.response_tokens < sum(len(rollout.response_tokens) for rollout in whole.values()) / 2


def test_parts_that_the_sender_has_heard_of_are_not_looked_at(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    first = run(make_request("first", flush_seconds=0.1), stop_at=25)
    *heard, last = first.result.parts
    finished = {key for key, part in first.announced(Samples) if part in heard}
    left = [sample for sample in make_request().samples if (sample.prompt, sample.index) not in finished]
    assert finished and left
    for part in heard:
        artifacts.write_bytes(part, b"no rollouts")
    changes = {
        "samples": left,
        "resume_from": [make_request("first").sink],
        "known_until": {make_request("first").sink: heard[-1]},
    }
    second = run(make_request("second", **changes))
    assert second.finished() == {key: rollout for key, rollout in whole.items() if key not in finished}
    kept = sum(len(rollout.response_tokens) for rollout in read_rollouts([last]).values() if not rollout.finished)
    assert kept > 0
    asked = sum(len(rollout.response_tokens) for key, rollout in whole.items() if key not in finished)
    assert second.result.response_tokens <= asked - kept


def test_a_single_part_can_be_gone_on_from(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    first = run(make_request("first", flush_seconds=0.1), stop_at=25)
    snapshot = first.announced(Partial)[-1][1]
    held = read_rollouts([snapshot])
    second = run(make_request("second", resume_from=[snapshot]))
    assert second.finished() == whole
    total = sum(len(rollout.response_tokens) for rollout in whole.values())
    assert second.result.response_tokens == total - sum(len(rollout.response_tokens) for rollout in held.values())


def test_the_same_attempt_on_another_instance_keeps_the_parts_of_the_first(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    first = run(make_request(), stop_at=20)
    before = {part: artifacts.read_bytes(part) for part in first.result.parts}
    second = run(make_request(), generator)
    assert second.finished() == whole
    assert {part: artifacts.read_bytes(part) for part in before} == before
    assert second.result.parts == artifacts.list_files(make_request().sink)


def test_what_is_finished_is_announced_again_and_not_generated(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    first = run(make_request("first"), generator)
    weights = WeightsReference(version=2, uri="nowhere")
    again = run(make_request("second", resume_from=[make_request("first").sink], weights=weights), generator)
    assert sorted(again.announced(Samples)) == sorted(first.announced(Samples))
    assert again.result == GenerationResult(
        finished=len(whole), unfinished=0, parts=[], prompt_tokens=0, response_tokens=0
    )


@pytest.mark.parametrize("cut", [None, 10])
def test_samples_of_another_weights_version_are_not_used(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], GeneratedSample],
    cut: int | None,
    tiny_model: Path,
) -> None:
    old = make_request("old", weights=WeightsReference(version=1, uri=str(tiny_model)))
    run(old, stop_at=cut)
    outcome = run(make_request("new", resume_from=[old.sink]), generator)
    assert outcome.finished() == whole
    assert outcome.result.response_tokens == sum(len(rollout.response_tokens) for rollout in whole.values())


@pytest.fixture
def versions(tiny_model: Path, tmp_path: Path) -> list[WeightsReference]:
    """Three versions of the tiny model, by their number."""
    made = []
    for number in range(3):
        folder = shutil.copytree(tiny_model, tmp_path / f"version-{number}")
        torch.manual_seed(number)
        weights = {
            name: tensor + 0.1 * torch.randn_like(tensor)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        made.append(WeightsReference(version=number, uri=str(folder)))
    return made


def test_a_response_that_older_weights_began_keeps_their_tokens_and_says_which_are_whose(
    make_request: Callable[..., GenerationRequest], generator: Generator, versions: list[WeightsReference]
) -> None:
    """Cut twice, it goes on with newer weights each time. Every token has the log-probability of what sampled it."""
    sinks: list[str] = []
    held: list[dict[tuple[int, int], GeneratedSample]] = []
    announced: dict[tuple[int, int], GeneratedSample] = {}
    for weights, stop_at in zip(versions, (12, 14, None), strict=True):
        request = make_request(
            f"with-{weights.version}", weights=weights, oldest_version=0, resume_from=list(sinks), flush_seconds=0.05
        )
        outcome = run(request, stop_at=stop_at)
        announced |= outcome.finished()
        held.append(read_rollouts(outcome.result.parts))
        sinks.append(request.sink)
    assert len(announced) == len(make_request().samples)
    spans = {key: [(span.version, span.start, span.end) for span in each.versions] for key, each in announced.items()}
    assert any(len(each) == 3 for each in spans.values())
    for key, rollout in announced.items():
        newest = rollout.versions[-1].version
        for number, earlier in enumerate(held[:newest]):
            begun = earlier[key]
            count = len(begun.response_tokens)
            assert not begun.finished and begun.versions[-1].version <= number
            assert rollout.response_tokens[:count] == begun.response_tokens
            assert rollout.log_probs[:count] == begun.log_probs, "not computed again"
        for span in rollout.versions:
            expected = log_probs_under(versions[span.version], rollout)
            assert rollout.log_probs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=1e-4)


@pytest.mark.parametrize("instance", ["the same", "another", "the same, after an evaluation", "the same, not asked to"])
def test_a_response_keeps_the_keys_and_values_of_older_weights_if_its_own_instance_goes_on_with_it(
    make_request: Callable[..., GenerationRequest], versions: list[WeightsReference], instance: str
) -> None:
    ticks = Ticks()
    first = Generator(clock=ticks)
    events: list[Event] = []
    context = TaskContext(emit=events.append)
    ticks.at[20] = lambda: context.stop("cut")
    keep = {"keep_kv_cache": True, "oldest_version": 0}
    begun = first.run(make_request("begun", weights=versions[0], **keep), context)
    held = {key: each for key, each in read_rollouts(begun.parts).items() if not each.finished}
    if instance == "the same, after an evaluation":
        run(make_request("evaluation", weights=versions[1], purpose="evaluation"), first)
    request = make_request("goes-on", weights=versions[1], resume_from=[make_request("begun").sink], **keep)
    if instance == "the same, not asked to":
        request = request.model_copy(update={"keep_kv_cache": False})
    outcome = run(request, Generator() if instance == "another" else first)
    kept = outcome.result.decoding.kept_responses
    assert kept == (len(held) if instance == "the same" else 0)
    assert held
    differ = 0
    for key, before in held.items():
        rollout = outcome.finished()[key]
        tokens = len(before.response_tokens)
        assert rollout.response_tokens[:tokens] == before.response_tokens
        assert rollout.log_probs[:tokens] == before.log_probs
        anew = log_probs_under(versions[1], rollout)[tokens:]
        differ += rollout.log_probs[tokens:] != pytest.approx(anew, abs=1e-4)
    assert differ > len(held) / 2 if instance == "the same" else differ == 0


def log_probs_under(weights: WeightsReference, rollout: GeneratedSample) -> list[float]:
    """Of each response token, by a fresh forward pass over the whole sequence."""
    model = AutoModelForCausalLM.from_pretrained(weights.uri, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([[*rollout.prompt_tokens, *rollout.response_tokens]])).logits[0]
    of_response = logits[len(rollout.prompt_tokens) - 1 : -1].log_softmax(-1)
    return of_response.gather(1, torch.tensor(rollout.response_tokens)[:, None])[:, 0].tolist()


def test_what_older_weights_have_finished_is_not_generated_again(
    make_request: Callable[..., GenerationRequest], generator: Generator, versions: list[WeightsReference]
) -> None:
    first = run(make_request("first", weights=versions[0]), generator)
    again = make_request("second", resume_from=[make_request("first").sink], weights=versions[1], oldest_version=0)
    assert run(again, generator).finished() == first.finished()


def test_tokens_of_weights_that_are_too_old_or_newer_than_the_requests_are_not_used(
    make_request: Callable[..., GenerationRequest], generator: Generator, versions: list[WeightsReference]
) -> None:
    for made, asked, oldest in ((0, 2, 1), (2, 1, 0)):
        sink = f"by-{made}"
        run(make_request(sink, weights=versions[made]), stop_at=15)
        changes = {"resume_from": [make_request(sink).sink], "weights": versions[asked], "oldest_version": oldest}
        outcome = run(make_request(f"not-{made}", **changes), generator)
        assert {span.version for each in outcome.finished().values() for span in each.versions} == {asked}


def test_samples_outside_the_share_are_left_alone(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    first = run(make_request("first"), generator)
    mine = make_request().samples[3:7]
    second = run(make_request("second", samples=mine, resume_from=[make_request("first").sink]), generator)
    assert {key for key, _ in second.announced(Samples)} == {(sample.prompt, sample.index) for sample in mine}
    assert first.result.finished > second.result.finished == 4


def test_a_task_that_is_stopped_before_it_begins_loads_nothing(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    events: list[Event] = []
    context = TaskContext(emit=events.append)
    context.stop("drain")
    result = Generator().run(make_request(weights=WeightsReference(version=2, uri="nowhere")), context)
    assert (result.finished, result.unfinished, events) == (0, len(whole), [])


@pytest.mark.slow
def test_an_instance_that_is_killed_loses_no_more_than_its_last_moments(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    request = make_request("killed", flush_seconds=1e-6)
    run_and_kill(request, events=4)
    outcome = run(make_request("next", resume_from=[request.sink]), generator)
    assert outcome.finished() == whole
    assert outcome.result.response_tokens < sum(len(rollout.response_tokens) for rollout in whole.values())
