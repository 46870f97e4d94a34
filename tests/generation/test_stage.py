"""Generation as its caller sees it: requests in, events and rollout parts out."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rlhfless_functions import artifacts
from rlhfless_functions.api import GenerationRequest, Partial, Progress, Samples, SampleTask, WeightsReference
from rlhfless_functions.artifacts.copies import copy_place
from rlhfless_functions.artifacts.relaying import relayed
from rlhfless_functions.data.rollouts import GeneratedSample, read_rollouts, write_rollouts
from rlhfless_functions.generation.engines.transformers import TransformersEngine
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.runtime.task import TaskError
from rlhfless_functions.settings import EngineSettings, ModelSettings, SamplingSettings
from tests.artifacts.folders import publish
from tests.generation.shares import PROMPTS, SAMPLES, run
from tests.generation.shares import generator as generator  # The fixtures.
from tests.generation.shares import make_request as make_request
from tests.generation.shares import prompts as prompts
from tests.generation.shares import undisturbed as undisturbed
from tests.generation.shares import whole as whole

# --- a share that runs to its end --------------------------------------------------------------------------------


def test_every_sample_is_published_and_announced_once(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    request = make_request()
    outcome = run(request, generator)
    keys = [key for key, _ in outcome.announced(Samples)]
    assert sorted(keys) == [(prompt, i) for prompt in range(PROMPTS) for i in range(SAMPLES)]
    assert outcome.announced(Partial) == []
    rollouts = outcome.finished()
    assert {rollout.finish_reason for rollout in rollouts.values()} == {"stop", "truncated"}
    for rollout in rollouts.values():
        assert [vars(span) for span in rollout.versions] == [
            {"version": 2, "start": 0, "end": len(rollout.response_tokens)}
        ]
    result = outcome.result
    assert (result.finished, result.unfinished) == (PROMPTS * SAMPLES, 0)
    assert result.response_tokens == sum(len(rollout.response_tokens) for rollout in rollouts.values())
    assert result.prompt_tokens == sum(5 + 9 * row for row in range(PROMPTS))
    assert result.parts == artifacts.list_files(request.sink)
    for event in outcome.events:
        if isinstance(event, Samples):
            for sample in event.samples:
                assert sample.tokens == len(rollouts[sample.prompt, sample.index].response_tokens)
                assert sample.finish_reason == rollouts[sample.prompt, sample.index].finish_reason


def test_any_division_of_a_share_gives_the_same_samples(
    make_request: Callable[..., GenerationRequest], generator: Generator, whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    samples = make_request().samples
    random.Random(0).shuffle(samples)
    parts: dict[tuple[int, int], GeneratedSample] = {}
    for actor in range(3):
        request = make_request(f"actor-{actor}", samples=samples[actor::3], kv_budget_tokens=96 * (1 + 3 * actor))
        parts |= run(request, generator).finished()
    assert parts == whole


@pytest.mark.parametrize("changes", [{"seed": 12}, {"purpose": "evaluation"}, {"step": 4}])
def test_seed_purpose_and_step_all_matter(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], GeneratedSample],
    changes: dict[str, Any],
) -> None:
    other = run(make_request("other", **changes), generator).finished()
    assert other.keys() == whole.keys()
    same = sum(other[key].response_tokens == whole[key].response_tokens for key in whole)
    assert same <= 2  # A response of one token can be the same by chance.


def test_an_instance_answers_at_the_version_that_is_asked_for(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], GeneratedSample],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "next")
    weights = {name: tensor * 1.5 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    following = WeightsReference(version=3, uri=str(folder))
    generator.preload(make_request().model, make_request().weights)
    swapped = run(make_request("swapped", weights=following), generator).finished()
    fresh = run(make_request("fresh", weights=following)).finished()
    assert swapped == fresh
    assert {rollout.versions[0].version for rollout in swapped.values()} == {3}
    assert run(make_request("again"), generator).finished() == whole


@pytest.mark.usefixtures("artifact_cache")
@pytest.mark.parametrize("published", [True, False])
def test_a_new_instance_passes_on_the_model_that_a_job_begins_with_if_it_has_a_manifest(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], GeneratedSample],
    tiny_model: Path,
    s3: str,
    published: bool,
) -> None:
    model, line = f"{s3}/model", f"{s3}/lines/step-000000"
    contents = {path.name: path.read_bytes() for path in tiny_model.iterdir()}
    if published:
        publish(model, contents)
    else:
        for name, content in contents.items():
            artifacts.write_bytes(f"{model}/{name}", content)
    weights = WeightsReference(version=0, uri=model)
    sources = artifacts.Sources(token="t", line=artifacts.Line(line, "http://127.0.0.1:1"))
    generator.preload(make_request().model, weights, sources)
    request = make_request("sink", weights=weights, weights_from=[], weights_line=line)
    finished = run(request, generator).finished()
    assert {key: each.response_tokens for key, each in finished.items()} == {
        key: each.response_tokens for key, each in whole.items()
    }
    assert len(artifacts.list_files(line)) == published
    found = artifacts.manifest(model)
    assert (found is not None) == published
    assert found is None or relayed(copy_place(model, found.dump()).name) is not None


def test_it_is_told_how_long_the_weights_took(make_request: Callable[..., GenerationRequest]) -> None:
    now = 0.0

    class SlowToLoad(TransformersEngine):
        def load(self, model: ModelSettings, weights: WeightsReference, prefetched: object | None = None) -> None:
            nonlocal now
            super().load(model, weights, prefetched)
            now += 3.0

    generator = Generator(SlowToLoad(), clock=lambda: now)
    assert run(make_request(), generator).result.weights_seconds == 3.0


def test_an_instance_that_sleeps_between_requests_answers_the_same(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], GeneratedSample]
) -> None:
    settings = EngineSettings(name="transformers", sleeps=True)
    generator = Generator(settings=settings)
    generator.sleep()
    assert generator.engine is None, "nothing was chosen, and nothing was made"
    generator.preload(make_request().model, make_request().weights)
    for number in (1, 2):
        generator.sleep()
        assert run(make_request(f"sink-{number}", engine=settings), generator).finished() == whole
    assert generator.engine is not None


def test_parts_can_live_in_an_object_store(
    make_request: Callable[..., GenerationRequest],
    generator: Generator,
    whole: dict[tuple[int, int], GeneratedSample],
    s3: str,
) -> None:
    assert run(make_request(f"{s3}/sink"), generator).finished() == whole


# --- what is told on the way -------------------------------------------------------------------------------------


def test_progress_is_told_no_more_often_than_asked(make_request: Callable[..., GenerationRequest]) -> None:
    request = make_request(progress_seconds=0.1)
    outcome = run(request, step=0.03)
    progress = [event for event in outcome.events if isinstance(event, Progress)]
    # When it begins to generate, and then forty steps of 0.03 s, with one event in four of them.
    assert len(progress) == 1 + 10
    for event in progress:
        assert event.finished + event.running + event.waiting == len(request.samples)
        assert len(event.lengths) == event.running
        assert event.tokens >= sum(length for *_, length in event.lengths)
    assert [event.tokens for event in progress] == sorted(event.tokens for event in progress)
    told = [event.room for event in progress]
    assert told[0] is not None and told[0].sequences >= 1, "the first says what the engine has room for"
    assert told[1:] == [None] * 10


def test_running_samples_are_flushed_at_intervals(make_request: Callable[..., GenerationRequest]) -> None:
    outcome = run(make_request(flush_seconds=0.1), step=0.01)
    partials = outcome.announced(Partial)
    assert partials
    for key, part in partials:
        rollout = read_rollouts([part])[key]
        assert rollout.finish_reason == "cut"
        assert rollout.response_tokens


# --- what cannot be done -----------------------------------------------------------------------------------------


def refusal(request: GenerationRequest, generator: Generator) -> TaskError:
    with pytest.raises(TaskError) as caught:
        run(request, generator)
    return caught.value


def test_a_sample_that_is_asked_for_twice_is_refused(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    error = refusal(make_request(samples=[SampleTask(prompt=1, index=2)] * 2), generator)
    assert error.reason == "bad_request"
    assert "sample 2 of prompt 1 is requested 2 times" in str(error)


def test_a_prompt_that_does_not_exist_is_refused(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    error = refusal(make_request(samples=[SampleTask(prompt=99, index=0)]), generator)
    assert error.reason == "bad_request"
    assert "99" in str(error)


def test_a_prompt_over_the_limit_is_refused(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    request = make_request(sampling=SamplingSettings(max_prompt_tokens=40, max_response_tokens=8))
    error = refusal(request, generator)
    assert error.reason == "data_invalid"
    assert "prompt 4 has 41 tokens, more than sampling.maxPromptTokens (40)" in str(error)


def test_missing_prompts_and_weights_are_named(
    make_request: Callable[..., GenerationRequest], tmp_path: Path, generator: Generator
) -> None:
    error = refusal(make_request(prompts=str(tmp_path / "gone.parquet")), generator)
    assert error.reason == "artifact_missing"
    assert "gone.parquet" in str(error)
    error = refusal(make_request(weights=WeightsReference(version=9, uri=str(tmp_path / "void"))), generator)
    assert error.reason == "artifact_missing"
    assert "void" in str(error)


def test_a_sink_that_cannot_be_written_is_named(
    make_request: Callable[..., GenerationRequest], tmp_path: Path, generator: Generator
) -> None:
    (tmp_path / "file").write_text("in the way")
    error = refusal(make_request("file/sink"), generator)
    assert error.reason == "artifact_unwritable"
    assert "file/sink" in str(error)


def test_a_policy_that_has_diverged_is_told_by_step_version_and_prompt(
    make_request: Callable[..., GenerationRequest], tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "diverged")
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] *= float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    request = make_request(weights=WeightsReference(version=2, uri=str(folder)))
    error = refusal(request, Generator())
    assert error.reason == "non_finite_sample"
    assert "step 3: weights version 2" in str(error)
    assert "prompt 0, sample 0, response token 0" in str(error)
    assert artifacts.list_files(request.sink) == []


def test_a_corrupt_part_of_an_earlier_attempt_is_named(
    make_request: Callable[..., GenerationRequest], generator: Generator
) -> None:
    sink = make_request("earlier").sink
    write_rollouts(artifacts.join(sink, "part-000000.parquet"), [])
    artifacts.write_bytes(artifacts.join(sink, "part-000001.parquet"), b"not a table")
    error = refusal(make_request("new", resume_from=[sink]), generator)
    assert "part-000001.parquet" in str(error)
