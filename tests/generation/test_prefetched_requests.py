"""Requests whose weights an instance has fetched while it decoded an earlier one."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhfless_functions.api import GenerationRequest, NextWeights, Progress, WeightsReference
from rlhfless_functions.data.rollouts import GeneratedSample
from rlhfless_functions.generation.stage import Generator
from rlhfless_functions.weights import load_policy, load_tokenizer, publish_weights
from tests.generation.shares import Ticks, run
from tests.generation.shares import generator as generator  # The fixtures.
from tests.generation.shares import make_request as make_request
from tests.generation.shares import prompts as prompts
from tests.generation.shares import undisturbed as undisturbed
from tests.generation.shares import whole as whole
from tests.generation.test_prefetching import every_look_is_quick as every_look_is_quick
from tests.generation.test_prefetching import until
from tests.weights.random_models import nudge


def make_version(make_request: Callable[..., GenerationRequest], uri: str) -> WeightsReference:
    """Version 3, with other weights than version 2."""
    request = make_request()
    policy = load_policy(request.model, request.weights)
    nudge(policy)
    publish_weights(uri, policy, load_tokenizer(request.model, request.weights))
    return WeightsReference(version=3, uri=uri)


class HeldBack(Ticks):
    """A clock that stands still, at one reading, until the instance has settled a version."""

    def __init__(self, reading: int) -> None:
        super().__init__(at={reading: self._wait})
        self.generator: Generator | None = None

    def _wait(self) -> None:
        assert self.generator is not None
        until(lambda: self.generator is not None and self.generator._prefetcher.settled == 3)


@pytest.mark.parametrize("place", ["folder", "store"])
def test_the_next_version_is_fetched_while_a_request_decodes(
    make_request: Callable[..., GenerationRequest], whole: dict[tuple[int, int], GeneratedSample], tmp_path: Path,
    place: str, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    root = str(tmp_path) if place == "folder" else request.getfixturevalue("s3")
    third = make_version(make_request, f"{root}/weights/step-3")
    clock = HeldBack(20)
    generator = clock.generator = Generator(clock=clock)
    upcoming = [NextWeights(weights=third)]
    first = run(make_request("first", next_weights=upcoming, progress_seconds=1000.0), generator)
    assert first.finished() == whole, "the samples do not depend on it"
    told = [event.prefetched_version for event in first.events if isinstance(event, Progress)]
    # It is there before the first report where it is fetched faster than the prompts are read.
    assert told in ([2, 3], [3, 3]), "as it begins, and once the version is there"
    assert first.result.weights_fetched.prefetched == 0
    second = run(make_request("second", weights=third), generator)
    fetched = second.result.weights_fetched
    assert fetched.prefetched == 1
    assert (fetched.bytes > 0) == (place == "store")
    assert second.finished() == run(make_request("fresh", weights=third), Generator()).finished()
    assert {event.prefetched_version for event in second.events if isinstance(event, Progress)} == {None}


def test_a_sleep_forgets_what_was_prefetched(make_request: Callable[..., GenerationRequest], tmp_path: Path) -> None:
    third = make_version(make_request, str(tmp_path / "weights"))
    clock = HeldBack(20)
    generator = clock.generator = Generator(clock=clock)
    run(make_request("first", next_weights=[NextWeights(weights=third)]), generator)
    generator.sleep()
    second = run(make_request("second", weights=third), generator)
    assert second.result.weights_fetched.prefetched == 0
    assert second.finished() == run(make_request("fresh", weights=third), Generator()).finished()


@pytest.mark.slow
def test_an_instance_that_is_killed_as_it_prefetches_leaves_no_part_of_a_version(
    make_request: Callable[..., GenerationRequest], s3: str, artifact_cache: Path
) -> None:
    third = make_version(make_request, f"{s3}/weights/step-3")
    killed = make_request("killed", next_weights=[NextWeights(weights=third)])
    program = f"""
import sys, time
from rlhfless_functions.artifacts import retrieval
from tests.generation.shares import Generator, GenerationRequest, TaskContext, Ticks

plain = retrieval.ManifestEntry.describes

def stuck(entry, path):
    if path.name == "model.safetensors" and {str(artifact_cache)!r} in str(path):
        print("fetching", flush=True)
        time.sleep(1000)
    return plain(entry, path)

retrieval.ManifestEntry.describes = stuck
request = GenerationRequest.model_validate_json(sys.argv[1])
decodes = Ticks(at={{20: lambda: time.sleep(1000)}})
Generator(clock=decodes).run(request, TaskContext(emit=lambda event: None))
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, killed.model_dump_json()], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "fetching\n"
        process.kill()
    assert [path.name for path in artifact_cache.iterdir() if not path.name.startswith(".")] == []
    left = list(artifact_cache.glob(".*/model.safetensors"))
    assert len(left) == 1, "the file was there when the process was killed, and its folder had no name"
    after = run(make_request("after", weights=third), Generator())
    assert after.result.weights_fetched.bytes > left[0].stat().st_size, "it is fetched anew"
